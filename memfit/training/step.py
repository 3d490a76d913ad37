"""Step mode: the optimizer step is memfit's. Micro-batches are collated by themselves, longest samples first.

Not covered: optimizers that need a closure. Losses that need all samples together run through script mode's replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.batches.cut import Layout, candidate_layouts, shared_samples, uncuttable
from memfit.batches.samples import SampleBatch
from memfit.engine.accumulate import Weighting, WeightsChanged, Work, checked_loss
from memfit.engine.handover import hand_over
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, search, with_blocks
from memfit.planning.sizes import by_size, peak_of, profile_between
from memfit.profiling.profile import Profile
from memfit.profiling.trace import MakeWork
from memfit.training.core import Core, MadeReference
from memfit.training.learn import shapes_per_sample, structure_of
from memfit.training.ordered import Ordered
from memfit.training.planner import Task
from memfit.training.prove import infer_weighting
from memfit.training.tune import Tuner
from memfit.training.works import LossFn, StepWork, moved

PROOF_SAMPLES = 5
"""Samples that proofs run on."""
KEPT_SAMPLES = 32
"""Samples kept for verifying."""
BY_SAMPLES = Weighting("samples", "by samples")


class Stepper:
    """Runs effective batches through `loss_fn`, planning when it meets samples it has no plan for.

    `whole_loss(batch)` is the loss through the intercepted model, for losses that need all samples together.
    """

    def __init__(self, core: Core, loss_fn: LossFn, whole_loss: Callable[[Any], torch.Tensor]) -> None:
        self._core, self._loss_fn, self._whole_loss = core, loss_fn, whole_loss
        self._weighting: Weighting | None = None
        self._together = False
        self._largest = -1
        self._shapes: dict[Any, Any] = {}

    def ordered(self, batch: Any) -> Ordered:
        """The batch as it will be cut."""
        return Ordered.of_samples(batch) if isinstance(batch, SampleBatch) else self._cut_from(batch)

    def prepare(self, like: Ordered, share: int | None) -> None:
        """Plan for effective batches of `share` samples (None: as many) like those in `like`, without running any."""
        self._decide(like, share or like.samples)

    def task(self, batch: Any) -> Task:
        """What there is to profile in a batch like this one."""
        ordered = self.ordered(batch)
        return self._task(ordered, 0, Demand(ordered.samples))

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of an effective batch, its gradients gathered, as a tensor whose backward hands them over."""
        ordered = self.ordered(batch)
        if ordered.largest > self._largest or (self._weighting is None and not self._together):
            self._decide(ordered, ordered.samples)
        if self._together:
            return self._all_at_once(batch)
        try:
            return self._accumulated(ordered)
        except WeightsChanged:
            self._weigh_again(ordered)
        return self._all_at_once(batch) if self._together else self._accumulated(ordered)

    def _accumulated(self, batch: Ordered) -> torch.Tensor:
        core = self._core
        assert self._weighting is not None and core.plan is not None
        work = self._work(batch.piece, batch.samples, core.plan.precision)
        planned = core.plan.micro_batch

        def pieces_for(largest: int, tuner: Tuner | None) -> Sequence[int]:
            return self._pieces(batch, largest, planned, tuner)

        return hand_over(core.accumulated(work, self._weighting, pieces_for, largest=core.limit(core.plan)))

    def _all_at_once(self, batch: Any) -> torch.Tensor:
        whole = batch.collate() if isinstance(batch, SampleBatch) else batch
        return checked_loss(self._whole_loss(moved(whole, self._core.device)))

    def _pieces(self, batch: Ordered, largest: int, planned: int, tuner: Tuner | None) -> tuple[int, ...]:
        """Sizes of the micro-batches; where samples differ in size, each as large as planned for its first sample."""
        plan = self._core.plan
        if plan is None or not plan.by_size or not batch.ragged:
            return self._core.tuned_pieces(batch.samples, largest, tuner)
        found: list[int] = []
        start = 0
        while start < batch.samples:
            size = batch.sizes[start]
            usual, most = next(((n, m) for elements, n, m in plan.by_size if size <= elements), plan.by_size[-1][1:])
            count = max(1, usual * largest // planned)
            if tuner is not None:
                choice = tuner.next_choice()
                count = min(most, max(1, round(choice / max(1, size))))
            count = min(count, batch.samples - start)
            if tuner is not None:
                tuner.expect(choice, sum(batch.sizes[start : start + count]))
            found.append(count)
            start += count
        return tuple(found)

    # ---- what a batch is

    def _cut_from(self, batch: Any) -> Ordered:
        """An ordinary batch handed to `step`: cut along its samples."""
        tree = ((batch,), {})
        split = self._core.settings.split
        samples = shared_samples(batch)
        if samples is None and split is None:
            raise uncuttable("its tensors do not share a first dimension")
        key = structure_of(tree, self._core.model, self._core.device)
        layout = next(candidate_layouts(tree, samples or 0), Layout((), samples or 1))
        shapes = shapes_per_sample(tree, layout) if layout.cuts else ()
        if self._shapes.setdefault(key, shapes) != shapes:
            self._shapes[key], self._largest = shapes, -1  # another shape than planned for: plan again
        ordered = Ordered.of_tree(batch, layout, split)
        return ordered

    # ---- weighting

    def _decide(self, batch: Ordered, share: int) -> None:
        if self._weighting is None and not self._together:
            self._weigh(batch)
        if not self._together:
            self._plan(batch, share)
        self._remember(batch)
        self._largest = max(self._largest, batch.largest)

    def _remember(self, batch: Ordered) -> None:
        """Keep a few samples to verify with."""
        few = batch.few(KEPT_SAMPLES)

        def make(samples: int, backwards: bool) -> Work:
            ordered = few.backwards(samples) if backwards else few
            return self._work(ordered.piece, samples, "off")

        self._core.reference = MadeReference(few.samples, self._weighting or BY_SAMPLES, make)

    def _weigh(self, batch: Ordered) -> None:
        core = self._core
        if core.settings.weight is not None:
            self._weighting = Weighting("count", "by weight=", count=core.settings.weight)
            return
        few = min(PROOF_SAMPLES, batch.samples)
        if few < 2:
            self._weighting = BY_SAMPLES
            return
        work = self._work(batch.spread(few), few, "off")
        self._weighting, deviation = infer_weighting(work, few, core.staging, core.model)
        if self._weighting is None:
            self._together = True
            core.note(
                "note",
                f"the loss needs all samples together (its parts differ from the whole by {deviation.relative:.2g}): the model "
                "runs in two passes",
            )

    def _weigh_again(self, batch: Ordered) -> None:
        before = self._weighting
        self._weigh(batch)
        if self._weighting == before:
            self._together = True  # what was tried does not tell this batch from others: only the whole is safe

    # ---- planning

    def _plan(self, batch: Ordered, share: int) -> None:
        core = self._core
        if core.fixed is not None:
            return
        if self._largest >= 0:
            core.note("replan", "samples larger than any before: planned anew before they run")
        demand = Demand(share, core.settings.target_batch)
        longest = self._task(batch, 0, demand)
        if not batch.ragged:
            core.adopt(*core.planner.plan(longest))
            return
        core.adopt(*self._plan_by_size(batch, longest))

    def _plan_by_size(self, batch: Ordered, longest: Task) -> tuple[Plan, Profile]:
        """Micro-batches by size of sample: memory from the longest and a short one, speed from the median."""
        planner, demand = self._core.planner, longest.demand
        plan, at_most = planner.plan(longest, timed=False)
        short, middle = batch.samples * 3 // 4, batch.samples // 2
        at_least = planner.profile(self._task(batch, short, demand), plan.precision, like=at_most)
        ends = (
            (batch.sizes[short], with_blocks(at_least, plan.checkpoint)),
            (batch.sizes[0], with_blocks(at_most, plan.checkpoint)),
        )
        fixed = replace(demand, checkpoint=())  # the blocks are part of both profiles
        between = profile_between(ends, batch.sizes[middle], demand.share)
        timed = planner.timed(self._task(batch, middle, fixed), between)
        found = search([timed], planner.budget(), replace(planner.constrained(fixed), checkpoint=()))
        table = by_size(ends, found, planner.budget().room, batch.sizes[middle])
        peak = peak_of(ends, table)
        cost = replace(found.predicted, peak=peak.expected, upper=peak.upper)
        notes = (*plan.notes, "samples differ in size: micro-batches are made of samples of similar size")
        return replace(
            found, by_size=table, median=batch.sizes[middle], checkpoint=plan.checkpoint, predicted=cost, notes=notes
        ), timed

    def _task(self, batch: Ordered, index: int, demand: Demand) -> Task:
        def make_work(precision: str) -> MakeWork:
            def build(twin: Callable[[torch.Tensor], torch.Tensor], samples: int) -> Work:
                tree = batch.twins(index, samples, twin)
                return self._work(lambda start, stop: tree, samples, precision)

            return build

        def real_work(precision: str) -> Work:
            return self._work(batch.around(index), demand.share, precision)

        return Task(make_work, real_work, self._weighting or BY_SAMPLES, demand.share, demand, self._core.compiled)

    def _work(self, piece: Callable[[int, int], Any], samples: int, precision: str) -> StepWork:
        return StepWork(self._core.model, self._loss_fn, piece, samples, self._core.device, precision=precision)
