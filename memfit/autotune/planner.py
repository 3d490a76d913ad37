"""Turns work into a plan: profiles it, times a little of it, searches, and traces the chosen plan with its levers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointError

from memfit._errors import DoesNotFit, first_line
from memfit._units import format_bytes
from memfit.autotune.absent_device import CardMeasurer, not_measurable, target_of
from memfit.autotune.measure_sizes import Measurer
from memfit.autotune.memory import Memory
from memfit.autotune.precision_shift import gradient_shift
from memfit.autotune.settings import Settings
from memfit.autotune.task import Task
from memfit.engine.modules import normalises_batches
from memfit.engine.recovery import surviving
from memfit.engine.staged import Staging
from memfit.hardware.exhausted import is_out_of_memory
from memfit.levers.checkpoint import candidate_blocks, checkpointed
from memfit.levers.fsdp import FullySharded
from memfit.levers.precision import PRECISIONS, lower_precisions, script_precision
from memfit.planning.checkpointed import with_blocks
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, search
from memfit.profiling.allocator import thresholds_pinned
from memfit.profiling.profile import Profile
from memfit.tracing.build_profile import CHECK, Subject, measured_profile, state_bytes, state_there, traced_profile
from memfit.tracing.failures import TraceFailed, own_exception
from memfit.tracing.sharded_step import in_parts
from memfit.tracing.trace import MakeWork

FRAGMENTS = (
    "reserved memory is limited here, and the C library keeps freed heap reserved, in fragments: start with "
    "MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 in the environment for larger micro-batches and a safe fit"
)
ODD = 0.01
"""A single sample is traced on its own if it takes over this fraction of its peak more than the trace of several predicts:
operators treat dimensions of size one differently (a GPT keeps 2 % more then)."""
KERNELS = 5
"""Assumed bound of a whole batch's memory, in multiples of its tensors' growth. With that much room nothing is measured first
(an LSTM's kernels took 4.5 times its tensors, convolutions in float64 twice)."""


def doubling(most: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, ... and `most`."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


class Planner:
    """Plans for one model, optimizer and budget, and keeps the profiles. `shard`: what is sharded; then `optimizer` is the one
    of this rank's shard."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        memory: Memory,
        settings: Settings,
        staging: Staging,
        *,
        shard: str = "off",
        parts: FullySharded | None = None,
    ) -> None:
        self._shard, self._parts = shard, parts
        self._model, self._optimizer, self._device = model, optimizer, device
        self._memory, self.settings, self._staging = memory, settings, staging
        self.standing_per_sample = 0
        """Bytes per sample of the share besides its micro-batch, in the latest plan."""
        self.measurer = Measurer(model, optimizer, device, memory, staging)
        if settings.card is not None:
            self.measurer = CardMeasurer(model, optimizer, device, memory, staging, settings.card)

    def plan(self, task: Task, *, timed: bool = True, profile: Profile | None = None) -> tuple[Plan, Profile]:
        """Returns the plan for a task and its profile. `profile`: an existing one. Raises DoesNotFit."""
        task = replace(task, demand=replace(self.constrained(task.demand), equal=task.compiled))
        self.standing_per_sample = task.demand.standing_per_sample
        lever = self.settings.precision if self.settings.precision in PRECISIONS else "off"
        traced = profile if profile is not None and lever == "off" else self.profile(task, lever)
        if not timed:
            return self._decided(task, traced)
        own = self._timed(task, traced)
        try:
            return self._decided(self._of_timed(task, own), own, lower=not own.excess)
        except DoesNotFit:
            if not own.excess:
                raise
        own = self._timed(task, traced)  # what kernels seemed to take may have been a disturbance
        return self._decided(self._of_timed(task, own), own)

    def _timed(self, task: Task, traced: Profile) -> Profile:
        """Time the profile. Add a note if the prescribed size cannot be kept."""
        own = self.with_single(task, self.measurer.timed(task, traced))
        if not self.measurer.leaves_one(task.demand):
            return own
        alone = f"micro-batches of 2 would leave one of {task.demand.share} samples by itself, which the model cannot run"
        return replace(own, notes=(*own.notes, f"{alone}: one has 3"))

    def with_single(self, task: Task, own: Profile) -> Profile:
        """Traces a single sample on its own if it took more than the trace of several samples predicts."""
        smallest, more = own.excess[0] if own.excess else (0, 0)
        if own.timeline is None or smallest != 1 or more <= ODD * own.timeline.peak(1):
            return own
        lever = own.precision if own.precision_is_lever else "off"
        single = self.profile(task, lever, own.checkpoint, (1,), own).timeline
        return own if single is None else own.with_single(single)

    def _decided(self, task: Task, own: Profile, *, lower: bool = True) -> tuple[Plan, Profile]:
        """Plan by this profile. `lower`: may use a lower precision if nothing else fits and precision is "auto"."""
        try:
            return self._fast(task, own) if self.settings.precision == "fast" else self._search(task, own)
        except DoesNotFit:
            if self.settings.precision != "auto" or not (lower and self.settings.lowers):
                raise
            return self._lower(task, own)

    def _of_timed(self, task: Task, own: Profile) -> Task:
        return replace(task, demand=self.measurer.possible(task.demand, own))

    def whole(self, task: Task, profile: Profile) -> tuple[Plan, Profile]:
        """Plans to run a task's batch uncut. If it comes near the room, small micro-batches are measured first, because kernels
        take memory that no tensor shows. Raises DoesNotFit."""
        share = task.demand.share
        if self.settings.card is not None:
            profile = self.measurer.timed(task, profile)  # nothing runs, and only this gives the seconds
        demand = replace(task.demand, micro_batch=share)
        plan = search([profile], self._memory.budget(), demand)
        grows = plan.predicted.upper if profile.timeline is None else profile.timeline.growth(share)
        if self.settings.whole or (KERNELS * grows <= plan.room and profile.source != "measured"):
            return plan, profile
        try:
            measured = self.with_single(task, self.measurer.timed(task, profile))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return plan, profile  # an uncut batch does not need parts that run on their own
        if not self.measurer.may_run(share, measured):
            raise DoesNotFit(
                f"a batch of {share} as it is within {format_bytes(plan.limit)}",
                found="its kernels need memory beyond its tensors, and how much for a whole batch was not measured",
                next_move="let it be cut, or give it more memory",
            )
        return search([measured], self._memory.budget(), demand), measured

    def profile(
        self,
        task: Task,
        lever: str,
        checkpoint: tuple[str, ...] = (),
        sizes: Sequence[int] | None = None,
        like: Profile | None = None,
    ) -> Profile:
        """Profiles a task in a precision, by tracing if possible."""
        subject = self._subject(task, lever, checkpoint)
        if self.measurer.no_singles and task.available < CHECK:
            sizes = sizes or tuple(range(2, task.available + 1))
        if not task.compiled:
            try:
                found = self._traced(subject, task.make_work(lever), task.available, sizes, like)
                if found.timeline is None and sizes is None and task.available >= CHECK:
                    if self._is_here() and self._parts is None:
                        raise TraceFailed("it runs differently for other micro-batch sizes")
                    found = self._traced(subject, task.make_work(lever), task.available, doubling(task.available), like)
                notes = (*found.notes, *((FRAGMENTS,) if self._memory.reserved and not thresholds_pinned() else ()))
                return replace(found, heap_waste=self._memory.heap_waste, notes=notes)
            except TraceFailed as failed:
                self._check_measurable(failed, checkpoint)
                reason = failed.reason
        else:
            reason = "the model is compiled"
            self._check_measurable(TraceFailed(reason), checkpoint)
        work, reserved = task.real_work(lever), self._memory.reserved
        return self.measurer.smallest(
            lambda n: measured_profile(subject, work, task.available, self._staging, reason, n, reserved=reserved)
        )

    def traced_whole(self, task: Task) -> Profile:
        """Profiles a task that has a single size. Raises TraceFailed."""
        profile = self._traced(self._subject(task, "off", ()), task.make_work("off"), 1, (1,), None)
        return replace(profile, heap_waste=self._memory.heap_waste)

    def _traced(
        self, subject: Subject, make_work: MakeWork, available: int, sizes: Sequence[int] | None, like: Profile | None
    ) -> Profile:
        if self._parts is None:
            return traced_profile(subject, make_work, available, sizes, like)
        return in_parts(traced_profile(subject, make_work, available, sizes), self._parts.division)

    def _check_measurable(self, failed: TraceFailed, checkpoint: tuple[str, ...]) -> None:
        """Check that what could not be traced can run. Raise UsageError with the obstacle, the user code's exception, or
        torch's CheckpointError if a block computes something else when recomputed."""
        if checkpoint and isinstance(failed.__cause__, CheckpointError):
            raise failed.__cause__
        if not self._is_here():
            raise own_exception(failed) or not_measurable(self.settings.card, failed) from failed.__cause__

    def _is_here(self) -> bool:
        """Whether it can run here: the device is present and the parameters are not on meta."""
        return self.settings.card is None and not any(p.is_meta for p in self._model.parameters())

    def _search(self, task: Task, profile: Profile) -> tuple[Plan, Profile]:
        """Plan by composition, then trace the plan as a whole. If the trace needs more, lower the limit and search again."""
        demand, budget = task.demand, self._memory.budget()
        whole = less = 0
        for _ in range(4):
            now = self._memory.budget()
            try:
                plan = search([profile], replace(now, limit=now.limit - less), demand)
            except DoesNotFit:
                if not less:
                    raise
                break
            whole = self._traced_whole(task, plan, profile) or plan.predicted.upper
            # Read again, because searching and tracing have loaded libraries, which take room.
            budget = self._memory.budget()
            if whole <= budget.room:
                return replace(plan, held=budget.held, limit=budget.limit), profile
            less += max(1, whole - plan.predicted.upper)
        raise DoesNotFit(
            f"a batch of {demand.share} within {format_bytes(budget.limit)}",
            found=f"the closest plan needs {format_bytes(whole)} when traced whole, and "
            f"{format_bytes(budget.room)} are left",
            next_move=f"give it budget={budget.with_room_for(whole - budget.room)!r} or more",
        )

    def _traced_whole(self, task: Task, plan: Plan, profile: Profile) -> int | None:
        """Return the upper bound of the plan's peak from a trace of exactly this plan, or None if it needs no check."""
        if profile.timeline is None or (not plan.checkpoint and plan.micro_batch >= 2):
            return None  # the affine timeline was already checked to the byte
        if plan.micro_batch > task.available:
            return None
        try:
            whole = self.profile(task, plan.precision, plan.checkpoint, (plan.micro_batch,), profile)
        except RuntimeError as error:  # torch.utils.checkpoint found that the block recomputes something else
            raise DoesNotFit(
                f"checkpointing {', '.join(plan.checkpoint)}",
                found=first_line(error),
                next_move="pass checkpoint='off', or name blocks that compute the same when run again",
            ) from error
        if whole.timeline is None:
            return None
        peak = profile.priced(whole.timeline, plan.micro_batch, accumulates=plan.accumulation > 1)
        standing = task.demand.standing + task.demand.standing_per_sample * task.demand.share
        return peak.upper + standing + profile.kept_for((plan.micro_batch,))

    def _lower(self, task: Task, own: Profile) -> tuple[Plan, Profile]:
        """Use a lower precision because nothing else fits. Raise the script precision's own DoesNotFit if none helps."""
        for lever in self._lower_precisions():
            try:
                plan, profile = self._search(task, self.with_single(task, self.measurer.timed(task, self.profile(task, lever))))
            except DoesNotFit:
                continue
            note = f"computes in {lever}, because nothing fits in {own.precision}; {self._price(task, own, lever)}"
            return replace(plan, notes=(*plan.notes, note)), profile
        return self._search(task, own)

    def _price(self, task: Task, own: Profile, lever: str) -> str:
        """Describe the cost of a lower precision: how far it moves the gradient, measured if that fits."""
        if self.settings.card is not None:
            return "how far that moves the gradient is not known before it runs there"
        every = with_blocks(own, own.blocks)
        # Every peak includes the optimizer state, which does not exist before the first step.
        missing = max(0, state_bytes(self._optimizer) - state_there(self._optimizer))
        if every.peak(1, accumulates=False).upper - missing + own.model.gradient_bytes > self._memory.budget().room:
            return f"how far that moves the gradient was not measured, as one sample in {own.precision} does not fit"
        works = (task.real_work("off"), task.real_work(lever))
        with checkpointed(self._model, own.blocks):
            shift, samples = self.measurer.smallest(lambda n: (gradient_shift(*works, n, self._staging, self._device), n))
        return f"it moves the gradient by {shift:.2g} (relative, measured on {'one sample' if samples == 1 else 'two samples'})"

    def _fast(self, task: Task, own: Profile) -> tuple[Plan, Profile]:
        """Return the fastest plan over all precisions."""
        found = []
        for profile in (own, *(lower for lever in self._fast_precisions() for lower in self._beside(task, own, lever))):
            try:
                found.append(self._search(task, profile))
            except DoesNotFit:
                continue
        if not found:
            return self._search(task, own)
        return min(found, key=lambda pair: pair[0].predicted.seconds or float("inf"))

    def _beside(self, task: Task, own: Profile, lever: str) -> tuple[Profile, ...]:
        """Return the timed profile in another precision, or none if it runs out of memory."""
        profile = self.profile(task, lever)

        def timed() -> tuple[Profile, ...]:
            return (self.with_single(task, self.measurer.timed(task, profile, beside=own)),)

        return surviving(timed, self._device, lambda said: ())

    def _fast_precisions(self) -> tuple[str, ...]:
        fast = self._memory.fast_dtypes
        return tuple(p for p in lower_precisions(self._model.parameters(), self._device) if p in fast)

    def _lower_precisions(self) -> tuple[str, ...]:
        """Return the precisions to fall back to. For a device that is not here, only those that its chip computes fast."""
        if self.settings.card is not None:
            return self._fast_precisions()
        return lower_precisions(self._model.parameters(), self._device)

    def constrained(self, demand: Demand) -> Demand:
        """Applies the levers that the user prescribed to the demand."""
        settings = self.settings
        fewest = normalises_batches(self._model) or bool(settings.allow_inexact)
        demand = replace(self.measurer.possible(demand), leftover=settings.leftover, shard=self._shard, fewest=fewest)
        if settings.whole:
            demand = replace(demand, micro_batch=demand.share)
        elif settings.micro_batch is not None:
            demand = replace(demand, micro_batch=settings.micro_batch)
        if settings.all_blocks:
            return replace(demand, checkpoint=candidate_blocks(self._model))
        if settings.checkpoint is not None:
            return replace(demand, checkpoint=settings.checkpoint)
        return demand

    def _subject(self, task: Task, lever: str, checkpoint: tuple[str, ...]) -> Subject:
        is_lever = lever not in ("off", "float32")
        levers: Callable[[], AbstractContextManager[Any]] = (
            partial(checkpointed, self._model, checkpoint) if checkpoint else nullcontext
        )
        return Subject(
            self._model,
            self._optimizer,
            self._device,
            task.weighting,
            precision=lever if is_lever else script_precision(self._model.parameters(), self._device),
            precision_is_lever=is_lever,
            checkpoint=checkpoint,
            blocks=candidate_blocks(self._model) if not checkpoint and not task.compiled else (),
            levers=levers,
            target=target_of(self.settings.card),
            in_float32=self.settings.accumulate_in == "float32",
            counted=self.settings.counted or self.settings.card is not None,
            loop=self.settings.loop,
        )
