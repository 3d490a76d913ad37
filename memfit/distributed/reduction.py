"""Trains one effective batch over several ranks: the ranks agree on it, and its gradients are reduced once.

Each rank accumulates its own share, with its own recovery, before any collective. Then the ranks agree that all succeeded, what
each share weighs and which parameters any of them reached, and only then reduce gradients. In step mode some may already be
reduced during the last micro-batch (`overlap.py`). Not covered: losses that need the samples of all ranks at once. Each rank
computes them on its own share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from memfit._errors import RankFailed, Refused
from memfit.distributed.overlap import EARLY, Overlap
from memfit.distributed.rank_reports import (
    MOST_RIVALS,
    STATED,
    RankReporter,
    Stated,
    are_apart,
    check_rivals,
    check_same_step,
    is_mean,
    number_of,
    packed,
    share_of,
    stated,
    upstream_of,
)
from memfit.distributed.unwrap_ddp import TakenOver
from memfit.engine.gradients import product, scaled, scaled_part, sparse_parameters
from memfit.engine.handover import Factor, Total
from memfit.engine.staged import Staging
from memfit.engine.totals import wide
from memfit.engine.weighting import BY_SAMPLES, Weighting
from memfit.equivalence.weighting_codes import Way, common, way_of, ways_of, weighting_by
from memfit.hardware.exhausted import retry_on_oom
from memfit.ranks.buckets import Reducer
from memfit.ranks.ranks import Ranks

STEP = "a training step"
OF_SHARES = "each process computes it on its own share, as under DistributedDataParallel"
"""What happens to computations that need all samples of a batch."""
LOOKED_AT = 256
"""Number of leading elements of each parameter that ranks compare."""
BY_SAMPLES_CODE = way_of(BY_SAMPLES).code


class WholeShares(Exception):
    """Raised if another rank's loss takes all samples of its share together, so this one must too. Nothing was changed."""


class StepReduction:
    """Reduces the gradients of `staging`'s parameters over all `ranks`.

    Attributes: `mean` (whether sums are divided by the number of ranks, as in plain DistributedDataParallel), `torn` (whether
    an optimizer step began here and did not finish), `reporter` (adds facts about the ranks to the same exchange, if set),
    `part` (this rank's fraction of the latest batch, as means weigh it; None if totals were summed), `whole` (whether its loss
    takes all samples of its share together; if so on one rank, then on all, to keep exchanges matched), `overlap` (reduces
    gradients during the last micro-batch; None if nothing does, as in script mode).
    """

    def __init__(
        self, ranks: Ranks, model: nn.Module, staging: Staging, taken: TakenOver | None = None, *, overlaps: bool = False
    ) -> None:
        self.ranks = ranks
        self.mean, self._shares_buffers = (False, True) if taken is None else (taken.mean, taken.shares_buffers)
        self._model, self._staging = model, staging
        self.reporter: RankReporter | None = None
        self._heard: list[list[float]] = []
        self._parameters: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._overlaps, self._steps = overlaps, 0
        self.overlap: Overlap | None = None
        self.rebuild()
        self.torn = False
        self.part: float | None = None
        self.whole = self.apart = self.unseen = False

    def rebuild(self) -> None:
        """Rebuilds everything after the model's parameters were replaced, on all ranks."""
        self._look()
        self._sparse = {id(p) for p in sparse_parameters(self._model)}
        self._reducer = Reducer(self.ranks, self._parameters, overlaps=self._overlaps)
        before, self.overlap = self.overlap, None
        if self._overlaps:
            self.overlap = Overlap(self.ranks, self._staging, self._reducer.buffer, self)
            self.overlap.note = self.overlap.note if before is None else before.note

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that receive gradients, in the same order on every rank."""
        return list(self._parameters)

    def reduced(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums these gradients over all ranks, in place. Their number and shapes must be equal on every rank."""
        return self._reducer.sum(gradients)

    @property
    def collectives(self) -> int:
        """Number of collectives that carried gradients so far."""
        return self._reducer.collectives + (0 if self.overlap is None else self.overlap.collectives)

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Reports a failure inside to the other ranks, which are about to agree on this step."""
        try:
            with self.ranks.noticing("a step"):
                yield
        except RankFailed:
            raise
        except BaseException as error:
            self.ranks.failed(error)
            raise

    def combine(
        self,
        total: Total,
        weighting: Weighting,
        *,
        half: bool = False,
        unproven: bool = False,
        divided: bool = False,
    ) -> Weighting | None:
        """Makes a rank's own total the total of all ranks, in place.

        If ranks weight differently, nothing is changed and the way that holds on all of them is returned. A total not
        accumulated that way must be accumulated again. `unproven`: `weighting` was not proven; `divided`: the script divides a
        sum by its number of samples, so it is a mean. Raises RankFailed if another rank failed, Refused if the ranks do
        different things, WholeShares if another rank's share has to run whole.
        """
        self._look()
        gradients = {place: self._laid_out(place, gradient, half) for place, gradient in self._own(total).items()}
        told, done = None if self.overlap is None else self.overlap.settled(), frozenset[int]()
        if told is None:
            told = self._agreed(total, gradients, weighting, divided)
        elif self.overlap is not None:
            done = self.overlap.reduced
        check_same_step(told)
        if any(each.whole for each in told) and not self.whole:
            raise WholeShares
        if self.reporter is not None:
            self.reporter.heard(self._heard, self._steps)
        counting = [each for each in told if each.way is not None]
        self.unseen = any(each.unseen for each in counting)
        if (self.whole or self.unseen) and len({each.way for each in counting}) > 1:
            if told[self.ranks.rank].way not in (None, BY_SAMPLES_CODE):
                total.weight = float(total.samples)
            told = counting = [each.by_samples(BY_SAMPLES_CODE) for each in told]
            weighting = BY_SAMPLES
        if len({each.way for each in counting}) > 1:
            nothing = told[self.ranks.rank].way is None
            return self._common(ways_of(weighting, unproven=unproven or nothing))
        check_rivals(counting)
        self.apart = are_apart(told)
        share, total.value = self._weigh(total, told, summed=weighting.kind == "sum")
        reached = [i for i, any_ in enumerate(map(any, zip(*(each.reached for each in told)))) if any_]
        rest = [i for i in reached if id(self._parameters[i]) not in done]
        upstream = upstream_of(told, self.ranks.rank)
        if self._staging.parts is not None:
            self._hand_out_parts(total, product(total.factor, share), upstream)
            return None
        if any(not each.reached[i] for each in told for i in rest):
            gradients = self._filled(rest, gradients, half)
        summed = self._reducer.sum([self._scaled(gradients[i], product(total.factor, share)) for i in rest])
        found = {**{i: gradients[i] for i in reached}, **dict(zip(rest, summed))}
        total.gradients = [
            found.get(self._places[id(r)])
            if id(r) in self._places
            else scaled(g, share if r.is_leaf else product(share, upstream))
            for r, g in zip(total.receivers, total.gradients)
        ]
        # Gradients of inputs are not part of the sum, and still need the factor.
        own = [i for i, r in enumerate(total.receivers) if id(r) not in self._places and total.gradients[i] is not None]
        for i in own:
            total.gradients[i] = scaled(total.gradients[i], total.factor)
        total.factor = 1.0
        self._steps += 1
        self.share_buffers()
        if self.overlap is not None:
            self.overlap.heard(told, [self._parameters[i] for i in reached if id(self._parameters[i]) not in self._sparse])
        return None

    def agree_whole(self) -> None:
        """Waits until the losses of all ranks take all samples of their shares together. The rank that finds this out tells the
        others in their next exchange. Raises RankFailed if another rank failed."""
        self._look()
        nothing = Total(torch.zeros((), device=self.ranks.device), (), [], weight=0.0)
        there = False
        while not there:
            told = self._agreed(nothing, (), BY_SAMPLES, False)
            check_same_step(told)
            there = all(each.whole for each in told)

    def told_early(self, sums: Total, weighting: Weighting, *, willing: bool) -> list[Stated]:
        """Returns what every rank states before its last micro-batch's backward. `sums` has no gradients yet."""
        about = self._about(sums, weighting, ready=willing)
        return [stated(numbers, 0) for numbers in self.ranks.agree(about, EARLY)]

    def told_of_sums(self, total: Total, weighting: Weighting, summed: frozenset[int], *, worked: bool) -> list[Stated]:
        """Returns what every rank states about a part whose gradients were reduced during its last micro-batch. `summed`: ids
        of parameters that only other ranks reached."""
        self._look()
        reached = [place for place in self._own(total) if id(self._parameters[place]) not in summed]
        return self._agreed(total, reached, weighting, False, worked=worked)

    def _hand_out_parts(self, total: Total, factor: Factor, upstream: float) -> None:
        """Return sharded gradients, already reduced during accumulation. Only the factor remains, equal on every rank."""
        gathered = self._staging.take_parts() if total.parts is None else total.parts
        total.parts = None
        rest = list(zip(total.receivers, total.gradients))[len(gathered) :]
        total.gradients = [
            *(scaled_part(gradient, factor) for gradient in gathered),
            *(scaled(g, factor if r.is_leaf else product(factor, upstream)) for r, g in rest),
        ]
        total.factor = 1.0
        self._steps += 1
        self.share_buffers()

    def _common(self, ways: tuple[Way, ...]) -> Weighting:
        """Return a weighting of this rank that holds on all ranks. Raise Refused if there is none."""
        told = self.ranks.gather(ways, STEP)
        found = common(told)
        if found is None:
            used = ", ".join(ways[0].kind if ways else "any" for ways in told)
            raise Refused(
                "one loss over all processes",
                found=f"the denominator of its mean differs between them (by rank: {used})",
                next_move="compute the loss alike everywhere, or pass weight= (the denominator of each part)",
            )
        return weighting_by(found)

    def stepping(self, *_: object) -> None:
        """Records that an optimizer step begins."""
        self.torn = True

    def share_buffers(self) -> None:
        """Broadcasts rank 0's buffers if the model tracks batch statistics, as DistributedDataParallel does."""
        if not self._shares_buffers:
            return
        written = [b for b in self._model.buffers() if b.is_floating_point() or b.dtype is torch.int64]
        if written and self._normalises():
            self.ranks.from_first([b for b in written if b.is_contiguous()])

    def _normalises(self) -> bool:
        return any(isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None for m in self._model.modules())

    def _look(self) -> None:
        """List the current parameters in the same order everywhere, without inputs that require gradients."""
        if self._staging.parts is not None:
            return  # they are reduced during accumulation
        leaves = {id(leaf) for leaf in self._staging.leaves}
        outside = [p for p in self._staging.outside if id(p) not in leaves]
        self._parameters = [*self._model.parameters(), *outside]
        self._places = {id(p): i for i, p in enumerate(self._parameters)}

    def _own(self, total: Total) -> dict[int, torch.Tensor]:
        """Return this rank's gradients by the place of their parameter."""
        found = {}
        for receiver, gradient in zip(total.receivers, total.gradients):
            place = self._places.get(id(receiver))
            if place is not None and gradient is not None:
                found[place] = gradient
        return found

    def _agreed(
        self, total: Total, places: Collection[int], weighting: Weighting, divided: bool, *, worked: bool = True
    ) -> list[Stated]:
        """Exchange what every rank states about its part, which has gradients in these places."""
        about = self._about(total, weighting, divided=divided, digest=self._digest(), worked=worked)
        reached = packed([i in places for i in range(len(self._parameters))])
        of_itself = [] if self.reporter is None else self.reporter.stated()
        told = self.ranks.agree([*about, *reached, *of_itself], STEP)
        end = STATED + len(reached)
        self._heard = [numbers[end:] for numbers in told]
        return [stated(numbers[:end], len(self._parameters)) for numbers in told]

    def _about(
        self,
        total: Total,
        weighting: Weighting,
        *,
        divided: bool = False,
        digest: float = 0.0,
        worked: bool = True,
        ready: bool | None = None,
    ) -> list[float]:
        here = total.value.device.type == "cpu"
        early = ready is not None and isinstance(total.weight, (int, float))
        weight = number_of(total.weight) if here or early else math.nan
        value = number_of(total.value) if here else math.nan
        rivals = [0.0] * (2 * MOST_RIVALS)
        if here:
            codes = [way.code for way in ways_of(weighting, unproven=False)[1:]]
            watched = enumerate(map(number_of, total.watched), start=1)  # known means, by their position in the loss
            known = itertools.chain(*watched, *zip(codes, map(number_of, total.rivals)))
            rivals = [*map(float, known), *rivals][: 2 * MOST_RIVALS]
        overlap, paces = self.overlap, (0.0, 0.0)
        if overlap is not None:
            ready, paces = overlap.ready if ready is None else ready, overlap.trials.stated()
        code = float(way_of(weighting).code)
        about = [float(self._steps), weight, value, code, digest, float(total.samples), float(divided)]
        about += [float(self.torn), float(self.whole), float(total.unseen), float(bool(ready)), float(worked)]
        return [*about, *paces, self._incoming(total), float(total.calls), *rivals]

    @property
    def _looks(self) -> bool:
        """Whether this is one of the steps 1, 2, 4, 8, ... that compare what may need to wait for a device."""
        return not self._steps & (self._steps - 1)

    def _incoming(self, total: Total) -> float:
        incoming = total.incoming
        if not isinstance(incoming, torch.Tensor) or incoming.device.type == "cpu":
            return number_of(incoming)
        return number_of(incoming.cpu()) if self._looks else math.nan

    def _digest(self) -> float:
        """Return the sum of the first elements of all parameters in some steps. It is equal on every rank."""
        if not self._looks or self._staging.parts is not None:
            return 0.0
        with torch.no_grad():
            first = [p.detach().reshape(-1)[:LOOKED_AT].to(torch.float32).sum() for p in self._parameters if p.numel()]
            return number_of(torch.stack([some.cpu() for some in first]).double().sum()) if first else 0.0

    def _weigh(self, total: Total, told: Sequence[Stated], *, summed: bool) -> tuple[Factor, torch.Tensor]:
        """Return (the factor for this rank's gradients, the loss over all ranks)."""
        in_parts = self._staging.parts is not None
        share = share_of(told, self.ranks.rank, summed=summed, mean=self.mean, in_parts=in_parts)
        if summed and not is_mean(told):
            self.part = share if self.mean else None
            return share, self._summed(total, told, [float(each.way is not None) for each in told]) * share
        if total.value.device.type == "cpu":
            weights = [each.samples if summed else each.weight for each in told]
            whole = sum(weights)
            self.part = weights[self.ranks.rank] / whole if whole else 0.0
            return share, self._summed(total, told, weights) / whole if whole else total.value * math.nan
        samples = sum(each.samples for each in told)
        self.part = told[self.ranks.rank].samples / samples if samples else 1.0 / self.ranks.size
        own = torch.as_tensor(total.weight, dtype=wide(total.value.device), device=total.value.device)
        both = torch.stack([own, torch.where(own == 0, 0.0, total.value * own)])
        self.ranks.sum([both])
        own = torch.where(own == 0, float(in_parts), own)
        share = torch.where(both[0] == 0, 0.0, own / both[0])
        return share, (both[1] / both[0]).to(total.value.dtype)

    def _summed(self, total: Total, told: Sequence[Stated], weights: Sequence[float]) -> torch.Tensor:
        if total.value.device.type != "cpu":
            value = total.value.detach().clone()
            self.ranks.sum([value])
            return value
        values = [each.value * weight for each, weight in zip(told, weights) if weight]
        return torch.tensor(sum(values), dtype=total.value.dtype)

    def _filled(
        self, reached: Sequence[int], gradients: dict[int, torch.Tensor], half: bool
    ) -> dict[int, torch.Tensor]:
        """Add zeros for what only other ranks reached. Reduction starts once all ranks have memory for them."""
        with self.announcing():
            zeros = {i: self._patiently(partial(self._zeros, i, half)) for i in reached if i not in gradients}
        self.ranks.agree([], STEP)
        return {**gradients, **zeros}

    def _zeros(self, place: int, half: bool) -> torch.Tensor:
        parameter = self._parameters[place]
        dtype = torch.float32 if half and parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
        if id(parameter) in self._sparse:
            return torch.zeros_like(parameter, layout=torch.sparse_coo, dtype=dtype)
        return torch.zeros_like(parameter, dtype=dtype)

    def _laid_out(self, place: int, gradient: torch.Tensor, half: bool) -> torch.Tensor:
        """Return this rank's part of a gradient in the layout that every rank uses."""
        parameter = self._parameters[place]
        if half and gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = self._patiently(gradient.float)
        if not gradient.is_sparse and gradient.stride() != parameter.stride():
            made = self._patiently(partial(torch.empty_like, parameter, dtype=gradient.dtype))
            gradient = made.copy_(gradient)  # the same layout on every rank
        return gradient

    def _scaled(self, gradient: torch.Tensor, factor: Factor) -> torch.Tensor:
        return self._patiently(lambda: scaled(gradient, factor)) if gradient.is_sparse else scaled(gradient, factor)  # type: ignore[return-value]

    def _patiently(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return retry_on_oom(make, self.ranks.device)
