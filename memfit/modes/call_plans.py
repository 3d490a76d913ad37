"""Plans for kinds of calls: whether a call runs whole, and by which plan it is cut.

Calls that wait for one backward hold their activations together, and a script's loss shows its memory only when it runs. So at
first a call runs whole only if that leaves room for what may come. Otherwise it is cut, until a step was seen to need no more
than planned. Not covered: calls of several models that each fit whole but not together, where the last one takes what the first
one's backward needs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit._errors import DoesNotFit
from memfit.autotune.active_plan import Planned
from memfit.autotune.measure_sizes import UNSEEN
from memfit.autotune.task import LOSS_BOUND, Task
from memfit.batches.shapes import Shapes, no_larger
from memfit.batches.tree import tensors
from memfit.capture.call import Call
from memfit.capture.consumers import Consumer, OwnLoss, Twin
from memfit.capture.infer_layout import twin_call
from memfit.engine.buffers import beside_statistics
from memfit.engine.call_context import without_saved_tensors_hooks
from memfit.engine.weighting import BY_SAMPLES, Weighting
from memfit.engine.work import Work
from memfit.modes.call_kind import CallKind, PlannedCall
from memfit.modes.pending_calls import UNDERWAY
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, keepable, search
from memfit.profiling.profile import Profile
from memfit.runtime.core import Core
from memfit.tracing.build_profile import CHECK
from memfit.tracing.trace import MakeWork

RESERVE = 5
"""Until a step was seen, a call runs whole only if one part in this many of the available memory stays free."""
PAIRS = 8
"""float32 matrices over all pairs of samples that an unseen loss may hold at once (contrastive losses: similarities, their
logarithms both ways, and the gradients of all these), capped at half of the available memory."""
OWN_LOSS = OwnLoss()


class CallPlans:
    """Makes, keeps and renews the plans of calls."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._open = self._most_open = 0

    def opens(self) -> None:
        """Note a call before its backward."""
        self._open += 1
        self._most_open = max(self._most_open, self._open)

    def reopens(self) -> None:
        """Note that the latest call begins again."""
        self._open -= 1

    def ended(self) -> None:
        """Note that backward reached the calls since the last one, or that the optimizer stepped."""
        self._open = 0

    def bound(self, call: Call) -> Profile:
        """Return the profile of the call as a whole, which bounds what its pieces take."""
        task = self.task(call, OWN_LOSS, Demand(call.samples), BY_SAMPLES)
        return self._core.planner.profile(task, "off")

    def grew(self, kind: CallKind, call: Call, shapes: Shapes) -> None:
        """Plan again, before the call runs: its inputs are larger than any planned for."""
        if self._core.in_force.fixed is not None:
            return
        kind.shapes, kind.whole, kind.refused, kind.planned, kind.bound = shapes, 0, None, {}, self.bound(call)
        sizes = " ".join("x".join(map(str, shape)) for shape in shapes if shape)
        self._core.note("replan", f"inputs larger than any before ({sizes} per sample): replanned before they run")

    def runs_whole(self, kind: CallKind, call: Call) -> bool:
        """Return whether the call fits as a whole. If so, it is recorded, and its plan is put in force."""
        core, settings = self._core, self._core.settings
        if call.samples >= kind.too_many:
            return False
        if core.in_force.fixed is not None:
            return core.in_force.fixed.micro_batch >= call.samples and core.in_force.fixed.precision == "off"
        assert kind.bound is not None
        if settings.micro_batch is not None and settings.micro_batch < call.samples:
            return False
        if settings.precision not in ("auto", "off", "float32"):
            return False  # a prescribed precision is applied around micro-batches
        waiting = UNDERWAY.whole
        circumstances = core.in_force.settled, call.samples, waiting, self._most_open
        if kind.refused == circumstances or (kind.planned and kind.refused and kind.refused[0] == core.in_force.settled):
            return False  # (a cut call stays cut until more is known: checking takes time and memory)
        demand = Demand(call.samples, settings.target_batch, checkpoint=settings.checkpoint or ())
        if call.outputs.loss is None:
            demand = replace(demand, standing_per_sample=LOSS_BOUND * call.outputs.bytes_per_sample)
        try:
            plan, kind.bound = core.planner.whole(self.task(call, OWN_LOSS, demand, BY_SAMPLES), kind.bound)
        except DoesNotFit:
            if settings.whole:
                raise
            plan = None
        if plan is None or not (settings.whole or self._leaves_room(call, plan, kind.bound)):
            kind.whole, kind.refused = 0, circumstances
            return False
        if core.plan is None or (core.plan.share, core.plan.accumulation > 1) == (call.samples, True):
            plan = replace(plan, notes=(*plan.notes, "fits as is: it runs whole, as the script wrote it"))
            core.in_force.adopt(Planned(plan, kind.bound))
        kind.whole, kind.beside = max(kind.whole, call.samples), waiting
        return True

    def _leaves_room(self, call: Call, plan: Plan, profile: Profile) -> bool:
        """Return whether room is left beside this whole call for those that will wait for the same backward and, before a step
        was seen, for what may come."""
        core, grows = self._core, profile.added_by(call.samples)
        reserve = 0
        if not core.in_force.settled and not core.normalises_batches():  # (cutting changes batch norm's statistics)
            there = plan.room + grows
            pairs = 0 if call.outputs.loss is not None else PAIRS * 4 * call.samples**2
            reserve = max(there // RESERVE, min(pairs, there // 2))
        ran = any(timing.samples == call.samples for timing in profile.timings)
        unseen = grows // UNSEEN if core.device.type == "cpu" and not ran else 0
        return grows * (self._most_open - self._open) + max(reserve, unseen) <= plan.room

    def planned(
        self, kind: CallKind, call: Call, consumer: Consumer, weighting: Weighting, mode: str, standing_per_sample: int
    ) -> PlannedCall:
        """Return the plan for this consumer of the call's output. It is made at the first use, and again if there is more
        room."""
        with without_saved_tensors_hooks():
            return self._planned(kind, call, consumer, weighting, mode, standing_per_sample)

    def _planned(
        self, kind: CallKind, call: Call, consumer: Consumer, weighting: Weighting, mode: str, standing_per_sample: int
    ) -> PlannedCall:
        core = self._core
        found, shapes = kind.planned.get(consumer.name), call.shapes
        if found is not None and not no_larger(shapes, found.shapes):
            found = None
        if found is not None and call.samples <= found.demand.share and not found.demand.standing:
            return found
        demand = Demand(
            call.samples,
            core.settings.target_batch,
            mode=mode,
            standing=core.old_gradient_bytes(),
            standing_per_sample=standing_per_sample,
        )
        if found is not None and call.samples > found.demand.share:
            found = self._for_more(found, demand)
        elif found is not None and demand.standing < found.demand.standing:
            found = self._roomier(found, demand.standing)
        if found is None:
            there = kind.bound if isinstance(consumer, OwnLoss) else None
            plan, profile = core.planner.plan(self.task(call, consumer, demand, weighting), profile=there)
            found = self._adopted(plan, profile, demand, shapes)
        kind.planned[consumer.name] = found
        return found

    def _adopted(self, plan: Plan, profile: Profile, demand: Demand, shapes: Shapes) -> PlannedCall:
        made = PlannedCall(keepable(plan, profile, self._most_kept(profile)), profile, demand, shapes)
        self._core.in_force.adopt(made)
        return made

    def _for_more(self, planned: PlannedCall, demand: Demand) -> PlannedCall | None:
        """Return the plan for a call with more samples, none larger than planned for, or None if nothing fits. It reuses the
        profile: the call's own would tell less about larger samples."""
        core = self._core
        assert planned.profile is not None
        try:
            possible = core.planner.measurer.possible(core.planner.constrained(demand), planned.profile)
            plan = search([planned.profile], core.memory.budget(), replace(possible, equal=core.compiled))
        except DoesNotFit:
            return None
        return self._adopted(plan, planned.profile, demand, planned.shapes)

    def _roomier(self, planned: PlannedCall, standing: int) -> PlannedCall:
        """Return the plan now that the script zeroes its gradients before the batch runs, which frees their memory."""
        core = self._core
        planned.demand = replace(planned.demand, standing=standing)
        demand = replace(planned.demand, micro_batch=core.settings.micro_batch, checkpoint=planned.plan.checkpoint)
        assert planned.profile is not None
        try:
            plan = search([planned.profile], core.memory.budget(), demand)
        except DoesNotFit:
            return planned  # less memory is free now; the current plan stays
        if plan.micro_batch > planned.plan.micro_batch == planned.largest:
            return self._adopted(plan, planned.profile, planned.demand, planned.shapes)
        return planned

    def _most_kept(self, profile: Profile) -> int | None:
        """Return how many micro-batches may keep activations at once: one if the next would write what its graph has saved."""
        return 1 if beside_statistics(self._core.model, profile.written_buffers) else None

    def task(self, call: Call, consumer: Consumer, demand: Demand, weighting: Weighting) -> Task:
        """Return what to profile for this consumer of the call's output."""
        def make_work(precision: str) -> MakeWork:
            def build(twin: Twin, samples: int) -> Work:
                other, made = twin_call(call, twin, samples)
                its, more = consumer.twin(twin, samples)
                return its.work(other, precision, (*made, *more))

            return build

        def real_work(precision: str) -> Work:
            return consumer.work(call, precision)

        return Task(make_work, real_work, weighting, _traceable(call), demand, self._core.compiled)


def _traceable(call: Call) -> int:
    """Return the samples to trace with: more than a small call has, to tell the cost per sample from the fixed cost."""
    if call.split is not None or call.samples < 2 or any(t.layout is not torch.strided for t in tensors(call.tree)):
        return call.samples
    return max(call.samples, CHECK)
