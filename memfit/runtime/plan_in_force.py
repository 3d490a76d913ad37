"""What is in force while batches run: a plan, its levers, the sizes that are measured beside it, and the heap's ceiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit._units import format_bytes
from memfit.autotune.active_plan import Planned
from memfit.autotune.trim_heap import HeapWatch
from memfit.autotune.tuner import Tuner
from memfit.levers.checkpoint import checkpoint_blocks
from memfit.planning.plan import Plan
from memfit.planning.search import NORMS, WHOLE_NORMS
from memfit.profiling.profile import Profile

if TYPE_CHECKING:
    from memfit.runtime.core import Core

NOTICEABLE = 8 << 20
"""Bytes that a new size of micro-batch may keep before it is not worth trying (a ResNet: 4 MiB resident, 40 reserved)."""


class PlanInForce:
    """Puts plans in force and keeps them to their budget.

    Attributes: `active` (the plan, its profile and its tuner), `fixed` (a plan that was given, so that none is made),
    `settled` (whether a step was seen to take no more memory than planned), `on_plan` (called when a new plan is in force).
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.active: Planned | None = None
        self.fixed: Plan | None = None
        self.settled = False
        self.on_plan: Callable[[], None] = lambda: None
        self.heap = HeapWatch()
        self._undo_levers: Callable[[], None] = lambda: None

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return None if self.active is None else self.active.plan

    @property
    def profile(self) -> Profile | None:
        """The profile that the plan in force rests on."""
        return None if self.active is None else self.active.profile

    @property
    def tuner(self) -> Tuner | None:
        """What measures other micro-batch sizes; None once that is over."""
        return None if self.active is None else self.active.tuner

    def adopt(self, planned: Planned) -> None:
        """Put a new plan in force, and measure other micro-batch sizes beside it."""
        plan, before = planned.plan, self.plan
        again = before is not None and plan.micro_batch != before.micro_batch
        planned.tuner = self._tuner_of(planned)
        if self._core.device.type != "cpu":
            self._core.memory.give_back_cache()
        self.activate(planned)
        self._core.events.add(self._core.steps, "replan" if again else "plan", plan.summary())
        self.on_plan()
        if plan.accumulation > 1 and self._core.normalises_batches():
            self._core.tell(WHOLE_NORMS if self._core.settings.batchnorm == "whole" else NORMS)

    def activate(self, planned: Planned) -> None:
        """Put the plan of the next batch in force: its levers (activation checkpointing) replace those of the one before."""
        if planned is self.active:
            return
        self.release()
        self._checkpoint(planned.plan.checkpoint)
        self.active = planned
        self._limit_heap()
        if planned.profile is not None and planned.profile.source != "measured":
            self._core.buffers.declare(planned.profile.written_buffers)

    def _limit_heap(self) -> None:
        """Set the heap ceiling for the plan in force, at the largest micro-batch size that is tried beside it."""
        assert self.active is not None
        plan, tuner = self.active.plan, self.active.tuner
        most = plan if tuner is None else _resized(plan, tuner.largest // plan.unit, {})
        self.heap.ceiling = self._core.memory.heap_ceiling(most, self.active.profile)

    @contextmanager
    def without_levers(self) -> Iterator[None]:
        """Context manager without activation checkpointing."""
        self.release()
        try:
            yield
        finally:
            if self.plan is not None:
                self._checkpoint(self.plan.checkpoint)

    def _checkpoint(self, blocks: Sequence[str]) -> None:
        """Checkpoint these blocks. Recomputing them fragments the heap, so it is checked before each of them, too."""
        if blocks:
            core = self._core
            self._undo_levers = checkpoint_blocks(core.model, blocks, core.owner, self.heap.check, core.staging.is_swapped)

    @property
    def tuning(self) -> bool:
        """Whether micro-batches of other sizes than the plan's run as well, to be measured."""
        return self.tuner is not None and len(self.tuner.fitting) > 1

    def fix(self, plan: Plan) -> None:
        """Use a given plan instead of planning."""
        self.fixed = plan
        if plan.accumulate_in == "param":  # it has no room for float32 gradients
            self._core.settings = replace(self._core.settings, accumulate_in="param")
        self.adopt(Planned(plan, None))

    def release(self) -> None:
        """Undo the plan's levers (activation checkpointing)."""
        self._undo_levers()
        self._undo_levers = lambda: None

    @property
    def prescribed(self) -> int | None:
        """Samples per micro-batch, if a plan or the user fixed them."""
        return self.fixed.micro_batch if self.fixed is not None else self._core.settings.micro_batch

    def limit(self, plan: Plan) -> int:
        """Return the most samples per micro-batch: the plan's, or fewer since memory ran out."""
        return plan.micro_batch if self.active is None else min(plan.micro_batch, self.active.largest)

    def follow_drift(self) -> None:
        """Shrink micro-batches once kernels for new shapes have taken half of the margin."""
        plan = self.plan
        # Kept as asked; a given plan counted other held bytes.
        prescribed = self.prescribed is not None or self._core.settings.whole
        drift = 0 if plan is None or plan.mode == "replay" or prescribed else self._core.memory.drift(plan)
        if self.active is None or plan is None or drift <= plan.margin // 2:
            return
        self.active.tuner = None
        now = replace(plan, held=plan.held + drift)
        if plan.predicted.upper + now.held + 2 * plan.margin > plan.limit and self._core.memory.stop_new_kernels():
            self._core.note(
                "note",
                f"{format_bytes(drift)} more are reserved than when the plan was made, and no room is left for more kernels: "
                "steps run without oneDNN from now on, which caches kernels for every shape",
            )
        sizes_left = range(self.limit(plan), 0, -1)
        fitting = (n for n in sizes_left if plan.measured(n, {}).predicted.upper + now.held + plan.margin // 2 <= plan.limit)
        size = next(fitting, 1)
        self._change(replace(_resized(now, size, {}), held=now.held))
        if size == plan.micro_batch:
            return
        self._core.note(
            "replan",
            f"{format_bytes(drift)} more are reserved than when the plan was made (kernels for new shapes, or code outside the "
            f"step): micro-batches of {size}",
        )

    def reshare(self, share: int) -> None:
        """Give this rank that many samples of every effective batch from now on."""
        plan = self.plan
        if plan is None or self.fixed is not None:
            return
        if plan.accumulation == 1 and share > plan.share:
            self._core.forget()  # it has no room for accumulated gradients
        else:
            self._change(plan.with_share(share))

    def _tuner_of(self, planned: Planned) -> Tuner | None:
        """Return what measures other micro-batch sizes while training: those that fit with this plan's levers."""
        plan, profile = planned.plan, planned.profile
        prescribed = self._core.settings.micro_batch is not None or self._core.settings.whole
        if self._core.normalises_batches() or self._core.settings.allow_inexact:
            return None  # every size trains differently
        if profile is None or prescribed or self._core.compiled or plan.mode == "replay":
            return None
        if profile.kept_per_size > NOTICEABLE:
            return None  # every size tried would hold memory permanently
        fitting = [plan.unit * n for n in plan.sizes_with_same_levers()]
        alone = None if plan.by_size else plan.share  # planned without accumulated gradients beside it
        return Tuner(fitting, plan.unit * plan.micro_batch, self._core.device, alone=alone, whole=bool(plan.by_size))

    def end_tuning(self) -> None:
        active = self.active
        if active is None or active.tuner is None or not active.tuner.done:
            return
        before, (best, rates) = active.plan, active.tuner.best()
        active.tuner = None
        self._core.memory.give_back_cache()
        self._change(_resized(before, best // before.unit, {c // before.unit: rate for c, rate in rates.items()}))
        if active.plan.micro_batch != before.micro_batch:
            self._core.note("replan", f"measured while training: {active.plan.summary()}")

    def ran_out(self, tried: int, smaller: int, text: str) -> None:
        budget = format_bytes(self._core.memory.budget().limit)
        self._core.memory.ran_out()
        if self.active is not None:
            self.active.tuner, self.active.largest = None, min(smaller, self.active.largest)
        if self.plan is not None and smaller < self.plan.micro_batch:
            self._change(replace(_resized(self.plan, smaller, {}), predicted=self.plan.predicted))
        self._core.events.add(
            self._core.steps,
            "out of memory",
            f"a micro-batch of {tried} ran out of memory within {budget} ({text}); the batch restarted at {smaller}",
        )

    def _change(self, plan: Plan) -> None:
        assert self.active is not None
        self.active.plan, self.active.largest = plan, plan.micro_batch
        self._limit_heap()


def _resized(plan: Plan, micro_batch: int, rates: dict[int, float]) -> Plan:
    plan = plan.measured(micro_batch, rates)
    if plan.mode == "replay":
        return plan
    return replace(plan, mode="accumulate" if plan.accumulation > 1 else "whole")
