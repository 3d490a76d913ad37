"""Accumulates the gradients of an effective batch: micro-batch sizes, retries, loss scale, batch statistics, other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from memfit.autotune.tuner import Tuner
from memfit.batches.pieces import equal_sizes, next_size, sizes
from memfit.distributed.overlap import Load
from memfit.engine.accumulate import AroundLast, SharesDiffer, accumulate
from memfit.engine.call_context import Autocast
from memfit.engine.compose_state import Composition
from memfit.engine.handover import Total
from memfit.engine.random_state import HostDraws
from memfit.engine.recovery import Recovery, RestartBatch
from memfit.engine.staged import check_nothing_escaped
from memfit.engine.weighting import Weighting
from memfit.engine.work import Work
from memfit.runtime.batchnorm import WholeNorms
from memfit.runtime.loss_scale import HalfGraphs, LossScale, computes_in_half

if TYPE_CHECKING:
    from memfit.runtime.core import Core


class Accumulator:
    """Runs effective batches in micro-batches under the plan in force."""

    def __init__(self, core: Core) -> None:
        self._core, self._in_force, self._staging, self._memory = core, core.in_force, core.staging, core.memory
        self.scale, self.half_graphs = LossScale(), HalfGraphs()
        self.host_draws = HostDraws(self._missed_draws)
        self.recovery = Recovery(core.device, core.staging, core.buffers, core.in_force.ran_out, self.host_draws)
        self.whole_norms = WholeNorms(core.model) if core.settings.batchnorm == "whole" else None
        self._checked_escapes = False

    def pieces(self, samples: int, largest: int) -> tuple[int, ...]:
        """Return the micro-batch sizes for that many samples."""
        return (equal_sizes if self._core.compiled else sizes)(samples, largest, self._core.least)

    def tuned_pieces(self, samples: int, largest: int, tuner: Tuner | None) -> tuple[int, ...]:
        """Return the micro-batch sizes for that many samples of one size; several sizes in turn while a tuner measures."""
        if tuner is None:
            return self.pieces(samples, largest)
        found: list[int] = []
        left = samples
        while left:
            choice = tuner.next_choice(beside=bool(found), most=samples)
            size = next_size(left, choice, self._core.least)
            found.append(size - 1 if left - size == 1 and size > 2 else size)  # a single sample wastes most of a pass
            tuner.expect(choice, found[-1])
            left -= found[-1]
        return tuple(found)

    def run(
        self,
        work: Work,
        weighting: Weighting,
        pieces_for: Callable[[int, Tuner | None], Sequence[int]],
        *,
        largest: int,
        begin: Callable[[Sequence[int]], None] = lambda pieces: None,
        load: Callable[[Sequence[int]], Load] | None = None,
        repeats: bool = True,
        autocast: Sequence[Autocast] = (),
    ) -> Total:
        """Accumulate gradients over an effective batch and return the total. Recovery retries with smaller micro-batches, a
        lower loss scale or true shares where an attempt shows the need. `pieces_for(largest, tuner)` returns the micro-batch
        sizes; a tuner, if there is one, proposes each. `load` describes these sizes (`overlap.Load`); with it, the gradient
        all-reduce may overlap the last micro-batch's backward. Without `repeats`, SharesDiffer propagates where true shares
        would take a second attempt. `autocast` is the autocast state in which the script called the model."""
        self._in_force.follow_drift()
        plan = self._in_force.plan
        largest = largest if plan is None else min(largest, self._in_force.limit(plan))
        precision = plan.precision if plan is not None else "off"
        parameters = self._staging.parameters()
        told, looks = computes_in_half(parameters, self._core.device.type, precision, autocast), self.half_graphs.looks()
        exact: tuple[int, tuple[int, ...], list[list[float]]] | None = None

        def attempt(limit: int) -> Total:
            nonlocal exact
            if exact is not None and exact[0] != limit:
                exact = None  # memory ran out since: cut again
            tuner = self._in_force.tuner if limit == largest and exact is None else None
            if tuner is not None:
                tuner.begin()
            pieces, known = (tuple(pieces_for(limit, tuner)), None) if exact is None else exact[1:]
            begin(pieces)
            if tuner is not None and tuner.changes_before(0):
                self._memory.give_back_cache()
            self.prepare(len(pieces), parameters)
            half = told or self.half_graphs.seen
            scale = self.scale.scale if half else 1.0
            usual = load is not None and tuner is None and not half and exact is None
            last = self._around_last(load(pieces) if load is not None and usual else None, weighting, parameters)
            try:
                run = partial(accumulate, work, pieces, self._staging, weighting, parameters=parameters)
                before = self._before_backward(look=looks and not half and self._staging.parts is None)
                run = partial(run, alone=self._core.team.alone, around_last=last, before_backward=before)
                running = self._memory.running(self._in_force.plan, limit if self._staging.parts is None else 1)
                with running, self._staging.counting(), self.norms_of(len(pieces)):
                    total = self._run_checked(run, scale, known, self._after_micro_batch(tuner))
            except SharesDiffer as difference:
                if not repeats:
                    raise
                exact = limit, pieces, difference.shares  # (valid for these micro-batches only)
                raise RestartBatch from None
            if self._core.team.overlap is not None:
                self._core.team.overlap.attempted(total)
            return self.scale.accept(total) if half else total

        with self._core.team.computing():
            total = attempt(largest) if self._staging.parts is not None else self.recovery.run(attempt, largest)
        if told or self.half_graphs.seen:
            total.on_handover = self.scale.seen
        self._in_force.end_tuning()
        if not self._core.steps and self._core.device.type != "cpu":
            self._memory.give_back_cache()  # the optimizer's state comes into being in segments of its own
        self.apply_norms()
        return total

    def _before_backward(self, *, look: bool) -> Callable[[torch.Tensor], None] | None:
        """Return what is called with the loss of each micro-batch. With `look`, the graph of the first one tells whether it is
        computed in float16."""
        losses = itertools.count()
        if self._in_force.heap.ceiling is None and not look:
            return None

        def before(loss: torch.Tensor) -> None:
            if self._in_force.heap.ceiling is not None:
                self._in_force.heap.check()
            if look and not next(losses):
                self.half_graphs.look(loss)

        return before

    def _around_last(
        self, load: Load | None, weighting: Weighting, parameters: Sequence[torch.Tensor]
    ) -> AroundLast | None:
        """Return what overlaps gradient reduction with the attempt's last micro-batch, if all ranks may agree to that."""
        overlap = self._core.team.overlap
        if overlap is None:
            return None
        plan = self._in_force.plan
        whole = plan is not None and plan.shard == "off" and not weighting.watch
        room = 0 if plan is None else plan.limit - plan.held - plan.margin - plan.predicted.upper
        return overlap.attempting(load if whole else None, weighting, parameters, room)

    def _after_micro_batch(self, tuner: Tuner | None) -> Callable[[int], None] | None:
        if self._in_force.heap.ceiling is None and tuner is None:
            return None

        def after(index: int) -> None:
            if tuner is not None:
                tuner.micro_batch_done(index)
                if tuner.changes_before(index + 1):
                    self._memory.give_back_cache()
            if self._in_force.heap.ceiling is not None:
                self._in_force.heap.check()

        return after

    def prepare(self, micro_batches: int, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Prepare a pass: with several micro-batches or ranks, gradients of half precision parameters accumulate in float32."""
        if (micro_batches > 1 or not self._core.team.alone) and self._core.settings.accumulate_in == "float32":
            self._staging.accumulate_in_float32(parameters)

    def _run_checked(
        self,
        run: Callable[..., Total],
        scale: float,
        shares: list[list[float]] | None,
        after_micro: Callable[[int], None] | None,
    ) -> Total:
        if self._checked_escapes or self._staging.parts is not None:
            return run(scale=scale, shares=shares, after_micro=after_micro)
        parameters = self._staging.parameters()
        before = [p.grad for p in parameters]
        total = run(scale=scale, shares=shares, after_micro=after_micro)
        check_nothing_escaped(parameters, before, self._core.model)
        self._checked_escapes = True
        return total

    def norms_of(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context manager that gathers the batch statistics of that many micro-batches if batchnorm="whole";
        `apply_norms` then writes those of all at once."""
        return nullcontext() if self.whole_norms is None else self.whole_norms.gathered(micro_batches)

    def apply_norms(self) -> None:
        """Write the gathered batch statistics. With several ranks, `combine` writes those of all ranks instead."""
        if self.whole_norms is not None and self._core.team.alone:
            self.whole_norms.applied()

    def beginning(self, composition: Composition, *, unsure: bool) -> Callable[[], None]:
        """Begin a pass that may have to be repeated: for other ranks or, if `unsure`, for its own result. Returns a function
        that restores everything the pass moves."""
        put_back = self.recovery.remembered()[0] if unsure or not self._core.team.alone else None

        def begin_again() -> None:
            composition.undone()
            if put_back is not None:
                put_back()

        return begin_again

    def combine(
        self, total: Total, weighting: Weighting, *, unproven: bool = False, divided: bool = False
    ) -> Weighting | None:
        """Combine this rank's total with those of all ranks, in place; see `StepReduction.combine`."""
        team, half = self._core.team, self._core.settings.accumulate_in == "float32"
        counts = total.weight != 0.0 if isinstance(total.weight, float) else True
        other = team.combine(total, weighting, half=half, unproven=unproven, divided=divided)
        if other is None and self.whole_norms is not None and team.ranks is not None:
            gather = partial(team.ranks.gather, doing="batch norm's running statistics")
            self.whole_norms.applied(gather, counts=counts)
        return other

    def _missed_draws(self) -> None:
        """Report that a repeated pass drew other random numbers than the first."""
        self._core.tell(
            "the forward began to draw from Python's or NumPy's random generator in a batch that ran in two passes, which drew "
            "differently; from now on they draw the same"
        )
