"""Overlaps the all-reduce of gradients with the last micro-batch's backward, if all ranks agree.

The ranks agree before that backward. If each has run micro-batches as large without an error, knows its weight on the host and
weights like the others, gradients are scaled and reduced as they become ready (`ranks/overlapped.py`). Otherwise the batch ends
as usual. A rank whose backward fails contributes zeros so that the others finish. Then all report, and if any failed, all
accumulate the batch again without overlap. Gradients created by the backward are copied, since it may still use their storage.
Not covered: half precision, sparse gradients and parameters outside the model, reduced afterwards; sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch

from memfit._errors import RankFailed, Refused
from memfit.autotune.overlap_trials import Trials
from memfit.distributed.rank_reports import RankReporter, Stated, check_rivals, number_of, share_of
from memfit.engine.accumulate import AroundLast
from memfit.engine.handover import Factor, Total
from memfit.engine.recovery import RestartBatch
from memfit.engine.staged import Staging
from memfit.engine.weighting import BY_SAMPLES, Weighting
from memfit.hardware.clock import Clock
from memfit.ranks.overlapped import Buckets, Flight
from memfit.ranks.ranks import Ranks

WORTH = 1 << 20
"""Bytes of gradients from which overlap is tried. Fewer are reduced faster than an extra exchange takes."""
EARLY = "the last micro-batch of a training step"
Load = tuple[Hashable, int]
"""(what samples have in common, the largest micro-batch's load in that)"""


class Meeting(Protocol):
    """Exchanges what ranks tell each other about a batch."""

    mean: bool
    """Whether sums are divided by the number of ranks."""
    reporter: RankReporter | None
    """What ranks tell each other about themselves, if they do."""

    def told_early(self, sums: Total, weighting: Weighting, *, willing: bool) -> list[Stated]:
        """Returns what all ranks state before the backward of the last micro-batch."""
        ...

    def told_of_sums(self, total: Total, weighting: Weighting, summed: frozenset[int], *, worked: bool) -> list[Stated]:
        """Returns what all ranks state about parts whose gradients were reduced during it."""
        ...


class Unlike(RestartBatch):
    """Raised if a gradient arrived in an unsupported way. Nothing was handed over."""


class Overlap:
    """Overlaps this rank's gradient reduction with its last micro-batches.

    Attributes: `forced` (True: whenever all can; False: never; None: if it pays), `ready` (whether this rank could have in this
    batch), `reduced` (ids of parameters whose gradients in the latest total are already reduced), `ran` (steps with overlap),
    `collectives` (number that carried gradients), `trials`, `note` (callback for decisions).
    """

    def __init__(self, ranks: Ranks, staging: Staging, buffer: torch.Tensor, meeting: Meeting) -> None:
        self.forced: bool | None = None
        self.ready = False
        self.reduced: frozenset[int] = frozenset()
        self.ran = self.collectives = 0
        self.note: Callable[[str], None] = lambda message: None
        self._clock = Clock(ranks.device)
        self.trials = Trials(self._clock)
        self._ranks, self._staging, self._buffer, self._meeting = ranks, staging, buffer, meeting
        self._buckets = Buckets([], buffer)
        self._known: tuple[int, ...] = ()
        self._loads: dict[Hashable, int] = {}
        self._barred = self._said = False
        # Of the current batch: whether all ranks meet before it ends; whether sums were launched whose outcome not all have
        # reported, what was stated then, and which of them had no gradient from this rank.
        self._due = self._launched = False
        self._load: Load | None = None
        self._weighting = BY_SAMPLES
        self._told: list[Stated] | None = None
        self._summed: frozenset[int] = frozenset()
        self._begun: Any = None

    # ---- during an attempt at a batch

    def attempting(
        self, load: Load | None, weighting: Weighting, parameters: Sequence[torch.Tensor], room: int
    ) -> AroundLast | None:
        """Starts or restarts a batch. On a restart, ranks that wait for the outcome of their sums learn that these are void.

        `load` describes the micro-batches, None if overlap is impossible. `room` is the bytes for copies of gradients. Returns
        the context for the last backward, or None if it runs as usual.
        """
        if self._begun is None:
            self._begun = self._clock.now()
        if self._launched:
            self._tell_failed()
        self._load, self._weighting = None if self._barred else load, weighting
        known, self._known = self._known, tuple(map(id, parameters))
        if not self._due or self._load is None or not self._has_run(self._load) or known != self._known:
            return None
        return partial(self._around, room)

    def attempted(self, total: Total) -> None:
        """Ends this rank's attempt. Raises RestartBatch if gradients were reduced and another rank failed."""
        self.ready = self._load is not None and not self._barred and _on_host(total)
        if self._load is not None:
            kind, size = self._load
            self._loads = {**self._loads, kind: max(size, self._loads.get(kind, 0))}
        if not self._launched:
            return
        with self._waiting():
            told = self._meeting.told_of_sums(total, self._weighting, self._summed, worked=True)
        self._launched = False
        if not all(each.worked for each in told):
            raise RestartBatch
        self._told = told

    def _has_run(self, load: Load) -> bool:
        kind, size = load
        return size <= self._loads.get(kind, 0)

    @contextmanager
    def _around(self, room: int, sums: Total) -> Iterator[None]:
        """Runs the last micro-batch's backward inside. `sums` is the total without its gradients."""
        before = self._gathered()
        factor = self._agreed(sums, willing=_on_host(sums) and self._has_room(before, room))
        if factor is None:
            yield
            return
        flight = Flight(self._ranks, self._buckets)
        self._launched = True
        try:
            with self._hooked(flight, factor, before):
                yield
            with self._waiting():
                flight.finish(partial(self._rest, factor))
        except BaseException as error:
            if not isinstance(error, RankFailed):
                with suppress(RankFailed):  # the next exchange reports failed ranks
                    flight.abandon()
            raise
        finally:
            self.collectives += flight.launched

    def _gathered(self) -> list[torch.Tensor | None]:
        """Return the gradients accumulated so far."""
        return [self._alias(place).grad for place in range(len(self._buckets.parameters))]

    def _has_room(self, before: Sequence[torch.Tensor | None], room: int) -> bool:
        """Whether memory suffices for a copy of the largest gradient that this backward creates."""
        new = [p for p, gradient in zip(self._buckets.parameters, before) if gradient is None]
        return max((p.numel() * p.element_size() for p in new), default=0) <= room

    def _agreed(self, sums: Total, *, willing: bool) -> float | None:
        """Return the factor for this rank's gradients if all ranks agree, else None."""
        self._due = False
        with self._waiting():
            told = self._meeting.told_early(sums, self._weighting, willing=willing)
        if not _alike(told):
            return None
        share = share_of(told, self._ranks.rank, summed=self._weighting.kind == "sum", mean=self._meeting.mean)
        return number_of(sums.factor) * share

    @contextmanager
    def _hooked(self, flight: Flight, factor: float, before: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Pass gradients to the flight as soon as they are complete."""
        handles = []
        try:
            for place, gradient in enumerate(before):
                arrives = partial(self._arrives, flight, factor, place, gradient)
                handles.append(self._alias(place).register_post_accumulate_grad_hook(arrives))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrives(
        self, flight: Flight, factor: float, place: int, before: torch.Tensor | None, alias: torch.Tensor
    ) -> None:
        gradient = alias.grad
        usual = gradient is not None and not gradient.is_sparse and gradient.dtype is alias.dtype
        if gradient is None or not usual or flight.holds(place):
            self._barred = True  # e.g. checkpointed blocks that are recomputed in backwards of their own
            raise Unlike
        if gradient is not before:  # the backward may still use its storage
            alias.grad = gradient = gradient * factor
        elif factor != 1.0:
            gradient.mul_(factor)
        flight.arrived(place, self._in_one_piece(place, alias, gradient))

    def _rest(self, factor: float, place: int) -> torch.Tensor:
        """Return a gradient that the last micro-batch did not reach; zeros if no micro-batch did."""
        alias = self._alias(place)
        gradient = alias.grad
        if gradient is None:
            self._summed |= {id(self._buckets.parameters[place])}
            alias.grad = gradient = torch.zeros_like(alias)
        elif factor != 1.0:
            gradient.mul_(factor)
        return self._in_one_piece(place, alias, gradient)

    def _in_one_piece(self, place: int, alias: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if self._buckets.lies_alone(place) and not gradient.is_contiguous():
            alias.grad = gradient = torch.empty_like(alias).copy_(gradient)
        return gradient

    def _alias(self, place: int) -> torch.Tensor:
        return self._staging.alias(self._buckets.parameters[place])

    # ---- when a batch is combined

    def settled(self) -> list[Stated] | None:
        """Ends the batch. Returns what all ranks stated if gradients are already reduced, else None."""
        if self._launched:
            self._tell_failed()
        elif self._due:  # this rank took another path, but the others met before their last micro-batches
            self._meeting.told_early(_nothing(), BY_SAMPLES, willing=False)
        self._due = False
        told, self._told = self._told, None
        self.reduced = frozenset() if told is None else frozenset(map(id, self._buckets.parameters))
        self.ran += told is not None
        return told

    def heard(self, told: Sequence[Stated], reached: Sequence[torch.Tensor]) -> None:
        """Processes, equally on every rank, what all stated about this batch and which parameters any reached (without sparse
        gradients)."""
        beside = bool(self.reduced)
        self.trials.heard([each.paces for each in told])
        self._carry(reached)
        safe = all(each.ready for each in told) and self._buckets.nbytes >= (1 if self.forced else WORTH)
        if safe and self._begun is not None:
            self.trials.ran(beside, self._begun, self._clock.now())
        self._begun, self.ready, self._summed = None, False, frozenset()
        self._due = safe and (self._pays() if self.forced is None else self.forced)

    def _pays(self) -> bool:
        """Whether to overlap in the next batch. Both ways alternate until it is known whether that pays."""
        if self.trials.chosen and not self._said:
            self._said = True
            self.note(f"gradients are reduced during the last micro-batch: {self.trials.gain:.0%} faster")
        return self.trials.next_way()

    def _carry(self, reached: Sequence[torch.Tensor]) -> None:
        outside = set(map(id, self._staging.outside))
        wanted = [p for p in reached if id(p) not in outside]
        found = Buckets(wanted, self._buffer)
        if list(map(id, found.parameters)) != list(map(id, self._buckets.parameters)):
            self._buckets = found

    def _tell_failed(self) -> None:
        """Declare the launched sums void."""
        self._launched, self._summed = False, frozenset()
        self._meeting.told_of_sums(_nothing(), BY_SAMPLES, frozenset(), worked=False)

    def _waiting(self) -> AbstractContextManager[None]:
        reporter = self._meeting.reporter
        return nullcontext() if reporter is None else reporter.waiting()


def _alike(told: Sequence[Stated]) -> bool:
    """Whether all ranks can overlap and weight their parts alike. Equal on every rank."""
    counting = [each for each in told if each.way is not None]
    if not all(each.ready and not each.torn and each.weight == each.weight for each in told):
        return False
    if len({each.number for each in told}) > 1 or len({each.way for each in counting}) != 1:
        return False
    try:
        check_rivals(counting)
    except Refused:  # raised when the batch is combined
        return False
    return True


def _on_host(total: Total) -> bool:
    """Whether a part's weight is known without synchronizing with a device."""
    return all(_lies_on_host(number) for number in (total.weight, total.factor))


def _lies_on_host(number: Factor) -> bool:
    return not isinstance(number, torch.Tensor) or number.device.type == "cpu"


def _nothing() -> Total:
    return Total(torch.zeros(()), [], [], weight=0.0)
