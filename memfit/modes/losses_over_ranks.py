"""Combines the losses that a script computes on each rank: what each rank weighs, and what the user is told of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from memfit._errors import Refused
from memfit.capture.call import Call
from memfit.capture.expression import Term
from memfit.capture.masked_mean import count_of
from memfit.distributed.rank_reports import divisor_of
from memfit.distributed.reduction import OF_SHARES, StepReduction
from memfit.distributed.stray_gradients import StrayGradients
from memfit.engine.handover import ALMOST, Factor, Total
from memfit.engine.weighting import Weighting
from memfit.runtime.core import Core

DIVISORS = "what the losses of a step divide by"


class LossesOverRanks:
    """Combines losses over ranks; alone, they stay as they are. `strays`: averages gradients that bypass the forward."""

    def __init__(self, core: Core, batch_samples: Callable[[], int | None], is_busy: Callable[[], bool]) -> None:
        self._core, self._batch_samples = core, batch_samples
        self.strays: StrayGradients | None = None
        if core.team.reduction is not None:
            said = partial(core.note, "note")
            self.strays = StrayGradients(core.team.reduction, core.model, said, self._samples_here, is_busy)
        self._whole: list[int | None] = []

    def watch_strays(self) -> Callable[[], None]:
        """Average gradients that bypass the forward, from the first backward on. Returns a function that stops this."""
        if self.strays is None or self._core.staging.parts is not None:
            return lambda: None
        self.strays.watch()
        return self.strays.undo

    def runs_whole(self, samples: int | None) -> None:
        """Note the samples of a call whose gradients bypass memfit."""
        if self.strays is not None:
            self._whole.append(samples)

    def before_step(self) -> None:
        """Level the gradients that bypass the forward before the optimizer steps."""
        if self.strays is not None and self._core.staging.parts is None:
            self.strays.level_before_step()
        self._whole.clear()

    def _samples_here(self) -> int | None:
        """The samples of the loader's batch, else of the calls that ran whole since the last step; None if unknown."""
        told, known = self._batch_samples(), [samples for samples in self._whole if samples is not None]
        return told if told is not None else sum(known) if known and len(known) == len(self._whole) else None

    def own_weight(self, samples: int) -> float:
        """Return the weight of a call among the ranks: 0 if its batch is a placeholder for an empty one."""
        told = self._batch_samples()
        return float(samples if told is None else min(told, samples) if samples > 1 else told)

    def combining(self, total: Total, weighting: Weighting) -> Callable[[Factor], Factor]:
        """Return a function that reduces the total across ranks once. Its factor is reduced, too, as ranks may differ in it."""
        first: list[Factor] = []

        def combine(factor: Factor) -> Factor:
            if first:
                return _ratio(factor, first[0])  # another backward through a retained graph
            first.append(total.incoming)  # combine leaves no other factor
            total.factor = factor
            divided = isinstance(factor, float) and abs(factor * total.samples - 1.0) < ALMOST
            with self._core.team.announcing():
                self.combine(total, weighting, divided=divided)
            return 1.0

        return combine

    def combine(self, total: Total, weighting: Weighting, *, divided: bool = False) -> None:
        """Reduce a call's total across ranks. Raises Refused if they weight it differently."""
        total.calls = total.calls or 1
        if self._core.accumulator.combine(total, weighting, divided=divided) is not None:
            raise Refused(
                "one loss over all processes",
                found="the denominator of its mean is visible on some of them only, so they cannot weight it alike",
                next_move="give every process at least two samples of each batch, or pass loss_fn= to memfit.wrap",
            )
        if self._core.team.reduction is not None:
            self._say_how(self._core.team.reduction)
        if self.strays is not None and self._core.staging.parts is None:
            self.strays.combined()

    def over_all(self, call: Call, terms: Sequence[Term]) -> tuple[Term, ...]:
        """Rescale the terms so that the ranks' values, weighted by samples, give the value over all samples: sums add up, and
        other terms are divided by counts over all ranks."""
        reduction = self._core.team.reduction
        if reduction is None:
            return tuple(terms)
        own = self.own_weight(call.samples)
        counted = [replace(term, count=count_of(term)).counting(call.samples) for term in terms]
        told = reduction.ranks.agree([own, *(count if own else math.nan for count, _ in counted)], DIVISORS)
        samples, *counts = zip(*told)
        divisors = [divisor_of(numbers) for numbers in counts]
        if None in divisors:
            self._say_added(reduction)
        part = own / sum(samples) if own else 1.0
        sums = part * (reduction.ranks.size if reduction.mean else 1)
        return tuple(
            replace(term, count=sums, known=None) if divisor is None else replace(other, count=divisor * part, known=None)
            for term, (_, other), divisor in zip(terms, counted, divisors)
        )

    def _say_how(self, reduction: StepReduction) -> None:
        """Tell the user if memfit does not weight the last batch's loss across ranks, or sees only part of it."""
        if reduction.part is None:
            self._say_added(reduction)
        if reduction.apart:
            self._core.tell(f"the loss has a factor that differs between processes, such as its own value: {OF_SHARES}")
        if reduction.unseen:
            self._core.tell(
                "each process computes the loss of its own samples, in a way memfit cannot see: processes are weighted by "
                "their samples, where DistributedDataParallel weights all alike (a loss_fn= that memfit calls is weighted "
                "exactly)"
            )

    def _say_added(self, reduction: StepReduction) -> None:
        """Tell the user that sums add up across ranks. memfit cannot tell them from means whose divisor it does not see."""
        if not reduction.mean:
            size = reduction.ranks.size
            self._core.tell(
                f"the loss is a sum over samples as far as memfit sees: sums add up over the {size} processes, where "
                "DistributedDataParallel would take their mean. If each process divides it by a count from its own batch (a "
                f"shape, a mask's .item(), weights that add up to 1), gradients are up to {size} times too large: use .mean(), "
                "divide by a tensor that was summed over the batch, or pass loss_fn="
            )


def _ratio(factor: Factor, first: Factor) -> Factor:
    """Return the factor of gradients that have the first one in them. (Both are 0 where autograd passes zeros on.)"""
    if isinstance(factor, float) and isinstance(first, float):
        return factor / first if first else 1.0 if not factor else math.nan
    both = torch.as_tensor(factor), torch.as_tensor(first)
    return torch.where((both[0] == 0) & (both[1] == 0), 1.0, both[0] / both[1])
