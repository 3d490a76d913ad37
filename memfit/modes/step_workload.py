"""Work to run, tasks to profile and plans for the batches of step mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memfit.autotune.task import Task
from memfit.capture.workloads import LossFn, StepWork
from memfit.engine.weighting import BY_SAMPLES, Weighting
from memfit.engine.work import Work
from memfit.modes.ordered_batch import Ordered
from memfit.planning.checkpointed import with_blocks
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, search
from memfit.planning.sizes import by_size, peak_of, peaks_of, profile_between, with_padding
from memfit.profiling.profile import Profile
from memfit.runtime.core import Core
from memfit.tracing.build_profile import CHECK
from memfit.tracing.trace import MakeWork

HELD = 2
"""Uncollated batches in memory during a step besides the one used for planning: the current one and the previous one, which
loops and loaders free later. (A ViT's heap grew by two to three batches of 16 to 64 samples.)"""


class Tasks:
    """Work, tasks and plans for `loss_fn` on ordered batches.

    Attribute: `writes` (whether `loss_fn` wrote into its batch; it then gets copies, so that repeated runs give the same).
    """

    def __init__(self, core: Core, loss_fn: LossFn) -> None:
        self.writes = False
        self._core, self._loss_fn = core, loss_fn

    def task(self, batch: Ordered, index: int, demand: Demand, weighting: Weighting) -> Task:
        """Return the task to profile for samples like the `index`-th."""

        def make_work(precision: str) -> MakeWork:
            def build(twin: Callable[[torch.Tensor], torch.Tensor], samples: int) -> Work:
                tree = batch.twins(index, samples, twin)
                return self.work(lambda start, stop: tree, samples, precision)

            return build

        def real_work(precision: str) -> Work:
            return self.work(batch.around(index), demand.share, precision)

        available = batch.available or max(demand.share, CHECK)  # samples may repeat unless they must be neighbors
        return Task(make_work, real_work, weighting, available, demand, self._core.compiled)

    def work(
        self,
        piece: Callable[[int, int], Any],
        samples: int,
        precision: str,
        *,
        there: bool = False,
        on_copies: bool = False,
    ) -> StepWork:
        """Return the work of `loss_fn` on pieces of `samples` samples. `there`: they are on the device already; `on_copies`:
        use copies, as always once `loss_fn` was seen to write."""
        model, device = self._core.model, self._core.device
        on_copies = on_copies or self.writes
        return StepWork(
            model, self._loss_fn, piece, samples, device, precision=precision, there=there, on_copies=on_copies
        )

    def watch(self, work: StepWork) -> None:
        """Record whether the loss function wrote into the copies from `work`."""
        self.writes = self.writes or work.wrote()

    def profile(self, batch: Ordered, share: int) -> Profile | None:
        """Profile the largest sample. Memory does not depend on the weighting. Returns None for a plan made elsewhere."""
        if self._core.in_force.fixed is not None:
            return None
        return self._core.planner.profile(self.task(batch, 0, Demand(share), BY_SAMPLES), "off")

    def planned(
        self, batch: Ordered, share: int, weighting: Weighting, profile: Profile | None
    ) -> tuple[Plan, Profile]:
        """Plan for effective batches of `share` samples like these. Returns the plan and its profile (`profile`: an existing
        one of the largest sample). Raises DoesNotFit."""
        planner = self._core.planner
        demand = Demand(share, self._core.settings.target_batch, standing_per_sample=self._held_per_sample(batch))
        longest = self.task(batch, 0, demand, weighting)
        if not batch.ragged or planner.constrained(demand).micro_batch is not None:
            return planner.plan(longest, profile=profile)
        return self._planned_by_size(batch, longest, profile)

    def _planned_by_size(self, batch: Ordered, longest: Task, profile: Profile | None) -> tuple[Plan, Profile]:
        """Micro-batches by sample size: memory from the longest and a short sample, speed from the median."""
        planner, memory, demand = self._core.planner, self._core.memory, longest.demand
        plan, at_most = planner.plan(longest, timed=False, profile=profile)
        short, middle = batch.samples * 3 // 4, batch.samples // 2
        shorter = self.task(batch, short, demand, longest.weighting)
        if at_most is profile:  # traced before there was a weighting
            shorter = replace(shorter, weighting=BY_SAMPLES)
        at_least = planner.profile(shorter, plan.precision, like=at_most)
        ends = (
            (batch.sizes[short], with_blocks(at_least, plan.checkpoint)),
            (batch.sizes[0], with_blocks(at_most, plan.checkpoint)),
        )
        fixed = replace(demand, checkpoint=())  # both profiles include the blocks
        between = profile_between(ends, batch.sizes[middle], demand.share)
        timed = self._timed(self.task(batch, middle, fixed, longest.weighting), between, plan)
        timed = with_padding(timed, batch.sizes[middle], batch.sizes)
        found = search([timed], memory.budget(), replace(planner.constrained(fixed), checkpoint=()))
        standing = demand.standing_per_sample * demand.share
        table = by_size(ends, found, memory.budget().room - standing, batch.sizes[middle])
        peak, peaks = peak_of(ends, table, batch.sizes), peaks_of(ends, table)
        cost = replace(found.predicted, peak=peak.expected + standing, upper=peak.upper + standing)
        said = "samples differ in size: micro-batches are made of samples of similar size"
        notes = tuple(dict.fromkeys((*plan.notes, *found.notes, said)))  # also those of timing
        checkpoint = plan.checkpoint
        plan = replace(found, by_size=table, size_peaks=peaks, median=batch.sizes[middle])
        return replace(plan, checkpoint=checkpoint, predicted=cost, notes=notes), timed

    def _timed(self, task: Task, between: Profile, plan: Plan) -> Profile:
        """The profile of median-size samples with seconds. For a GPU that is not local, these come from a trace."""
        planner = self._core.planner
        timed = planner.measurer.timed(task, between)
        if self._core.settings.card is None:
            return timed
        traced = planner.measurer.timed(task, planner.profile(task, plan.precision, plan.checkpoint))
        return replace(timed, timings=traced.timings, optimizer_seconds=traced.optimizer_seconds)

    def _held_per_sample(self, batch: Ordered) -> int:
        """Bytes per sample of all uncollated batches in memory at once, if CPU memory is planned."""
        on_host = self._core.device.type == "cpu" and self._core.settings.card is None
        return HELD * batch.nbytes() // max(1, batch.samples) if on_host else 0
