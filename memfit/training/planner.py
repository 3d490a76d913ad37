"""From work to plan: profile it, time a little of it, search, trace what was chosen, and apply its levers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import DoesNotFit
from memfit._units import format_bytes
from memfit.engine.accumulate import Weighting, Work
from memfit.engine.staged import Staging
from memfit.hardware.heap import give_back_free_heap
from memfit.levers.checkpoint import candidate_blocks, checkpointed
from memfit.levers.precision import PRECISIONS, lower_precisions, script_precision
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, micro_batch_sizes, search, with_blocks
from memfit.profiling.allocator import HIGH_HEAP_WASTE, thresholds_pinned
from memfit.profiling.build import CHECK, Subject, measured_profile, state_bytes, traced_profile
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import Timing, never_slower
from memfit.profiling.timing import Stopwatch, optimizer_seconds, time_sizes
from memfit.profiling.trace import MakeWork, TraceFailed
from memfit.training.memory import Memory
from memfit.training.recover import is_out_of_memory, surviving
from memfit.training.settings import Settings
from memfit.training.shift import gradient_shift
from memfit.training.tune import doubling

TIMING_SECONDS = 0.7
"""How long micro-batches are timed while planning; training itself goes on measuring (`tune.py`)."""
MOST_KEPT = 0.1
"""Share of the room that kernels for sizes of micro-batches tried while planning may keep for good."""
HIDDEN_KEPT, HIDDEN_SHARE = 16 << 20, 0.1
"""Bytes that a size keeps, and share of its tensors that it takes beyond them, from which on kernels are taken to hide memory
(transformers keep up to 8 MiB once and take 3 %; convolutions 40 MiB per size, or half as much again for 2 samples)."""
FRAGMENTS = (
    "what is limited here is reserved memory, and the C library keeps freed heap reserved, in fragments: start with "
    "MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 in the environment for larger micro-batches and a sure fit"
)
KERNELS = 5
"""How many times what its tensors grow by a whole batch may take beside them; where there is room for that, nothing is
measured before it runs (an LSTM's kernels were seen to take 4.5 times its tensors, convolutions in float64 twice)."""
BUSY = 1.5
"""Processes that want to run, per core, from which on timings are taken to be disturbed (a training itself makes it 1)."""
SAFE_FROM_SINGLES = 3
"""Where micro-batches may have this many samples or more, no sample is left by itself (at most 2: 3 = 2 + 1)."""


@dataclass(frozen=True)
class Task:
    """What is planned: one kind of work on one kind of batch."""

    make_work: Callable[[str], MakeWork]
    """From a precision to what makes twin work for tracing."""
    real_work: Callable[[str], Work]
    """From a precision to the real work, for timing."""
    weighting: Weighting
    """How its micro-batches are weighted."""
    available: int
    """Samples that there are to trace with."""
    demand: Demand
    """How much of it."""
    compiled: bool = False
    """Whether the model is compiled: then it is measured, not traced."""


class Planner:
    """Plans for one model, optimizer and budget, and remembers the profiles it made."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, memory: Memory, settings: Settings, staging: Staging
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._memory, self._settings, self._staging = memory, settings, staging
        self._no_singles = False
        self._most: int | None = None
        """Largest size that may be planned, once a larger one ran out of memory."""
        self._ran_out: tuple[str, ...] = ()

    def plan(self, task: Task, *, timed: bool = True, profile: Profile | None = None) -> tuple[Plan, Profile]:
        """The plan for a task and the profile it rests on (`profile`: one that is there already). Raises DoesNotFit."""
        task = replace(task, demand=replace(self.constrained(task.demand), equal=task.compiled))
        lever = self._settings.precision if self._settings.precision in PRECISIONS else "off"
        traced = profile if profile is not None and lever == "off" else self.profile(task, lever)
        if not timed:
            return self._decided(task, traced)
        own = self.timed(task, traced)
        try:
            return self._decided(self._of_timed(task, own), own, lower=not own.excess)
        except DoesNotFit:
            if not own.excess:
                raise
        own = self.timed(task, traced)  # what kernels were seen to take may have been a disturbance
        return self._decided(self._of_timed(task, own), own)

    def _decided(self, task: Task, own: Profile, *, lower: bool = True) -> tuple[Plan, Profile]:
        """The plan by this profile; `lower`: in a lower precision where nothing else fits and that was left to memfit."""
        try:
            return self._fast(task, own) if self._settings.precision == "fast" else self._search(task, own)
        except DoesNotFit:
            if self._settings.precision != "auto" or not lower:
                raise
            return self._lower(task, own)

    def _of_timed(self, task: Task, own: Profile) -> Task:
        return replace(task, demand=self._of_measured(self._of_possible(task.demand), own))

    def whole(self, task: Task, profile: Profile) -> tuple[Plan, Profile]:
        """The plan to run a task's batch as it is, and what it rests on. Where it comes near the room, small micro-batches are
        measured first: kernels take what no tensor shows. Raises DoesNotFit."""
        share = task.demand.share
        demand = replace(task.demand, micro_batch=share)
        plan = search([profile], self._memory.budget(), demand)
        grows = plan.predicted.upper if profile.timeline is None else profile.timeline.growth(share)
        if KERNELS * grows <= plan.room or self._settings.whole:
            return plan, profile
        try:
            measured = self.timed(task, profile)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return plan, profile  # parts of the batch need not run by themselves where it is not cut
        if share not in (self._only_measured(measured) or (share,)) or share > (self._most or share):
            raise DoesNotFit(
                f"a batch of {share} as it is within {format_bytes(plan.limit)}",
                found="its kernels take memory beside its tensors, and how much for a whole batch was not measured",
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
        """The profile of a task in a precision, traced where that is possible."""
        subject = self._subject(task, lever, checkpoint)
        if self._no_singles and task.available < CHECK:
            sizes = sizes or tuple(range(2, task.available + 1))
        if not task.compiled:
            try:
                found = traced_profile(subject, task.make_work(lever), task.available, sizes, like)
                notes = (*found.notes, *((FRAGMENTS,) if self._memory.reserved and not thresholds_pinned() else ()))
                return replace(found, heap_waste=self._memory.heap_waste, notes=notes)
            except TraceFailed as failed:
                reason = failed.reason
        else:
            reason = "the model is compiled"
        smallest, work = 2 if self._no_singles else 1, task.real_work(lever)
        return measured_profile(subject, work, task.available, self._staging, reason, smallest, reserved=self._memory.reserved)

    def _search(self, task: Task, profile: Profile) -> tuple[Plan, Profile]:
        """The plan by composition, then traced whole; where the trace needs more, that is learnt and searched again."""
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
            # Looked at anew: searching and tracing have loaded libraries, which take room themselves.
            budget = self._memory.budget()
            if whole <= budget.room:
                return replace(plan, held=budget.held, limit=budget.limit), profile
            less += max(1, whole - plan.predicted.upper)
        raise DoesNotFit(
            f"a batch of {demand.share} within {format_bytes(budget.limit)}",
            found=f"the plan that came nearest needs {format_bytes(whole)} when it is traced whole, and "
            f"{format_bytes(budget.room)} are left",
            next_move=f"give it budget={budget.with_room_for(whole - budget.room)!r} or more",
        )

    def _traced_whole(self, task: Task, plan: Plan, profile: Profile) -> int | None:
        """The upper bound of the plan's peak from a trace of exactly this plan; None where it needs no check."""
        if profile.timeline is None or (not plan.checkpoint and plan.micro_batch >= 2):
            return None  # the affine timeline was checked to the byte already
        if plan.micro_batch > task.available:
            return None
        try:
            whole = self.profile(task, plan.precision, plan.checkpoint, (plan.micro_batch,), profile)
        except RuntimeError as error:  # torch.utils.checkpoint's own check: the block computes another thing the second time
            raise DoesNotFit(
                f"checkpointing {', '.join(plan.checkpoint)}",
                found=str(error).splitlines()[0],
                next_move="pass checkpoint='off', or name blocks that compute the same when run again",
            ) from error
        if whole.timeline is None:
            return None
        peak = profile.priced(whole.timeline, plan.micro_batch, accumulates=plan.accumulation > 1)
        standing = task.demand.standing + task.demand.standing_per_sample * task.demand.share
        return peak.upper + standing + profile.kept_for((plan.micro_batch,))

    def _lower(self, task: Task, own: Profile) -> tuple[Plan, Profile]:
        """A lower precision, because nothing else fits. Raises the script precision's own DoesNotFit if none helps."""
        for lever in lower_precisions(self._model.parameters(), self._device):
            try:
                plan, profile = self._search(task, self.timed(task, self.profile(task, lever)))
            except DoesNotFit:
                continue
            note = f"computes in {lever}, because nothing fits in {own.precision}; {self._price(task, own, lever)}"
            return replace(plan, notes=(*plan.notes, note)), profile
        return self._search(task, own)

    def _price(self, task: Task, own: Profile, lever: str) -> str:
        """What a lower precision costs, in words: how far it moves the gradient, measured where that fits."""
        every = with_blocks(own, own.blocks)
        # The optimizer's state is part of every peak, and before the first step it is not there yet.
        missing = max(0, state_bytes(self._optimizer) - _state_there(self._optimizer))
        if every.peak(1, accumulates=False).upper - missing + own.model.gradient_bytes > self._memory.budget().room:
            return f"how far that moves the gradient was not measured, as one sample in {own.precision} does not fit"
        works = (task.real_work("off"), task.real_work(lever))
        with checkpointed(self._model, own.blocks):
            shift = gradient_shift(*works, self._staging, self._device)
        return f"it moves the gradient by {shift:.2g} (relative, measured on one sample)"

    def _fast(self, task: Task, own: Profile) -> tuple[Plan, Profile]:
        """The fastest over all precisions."""
        found = []
        for profile in (own, *(self.timed(task, self.profile(task, p), beside=own) for p in self._fast_precisions())):
            try:
                found.append(self._search(task, profile))
            except DoesNotFit:
                continue
        if not found:
            return self._search(task, own)
        return min(found, key=lambda pair: pair[0].predicted.seconds or float("inf"))

    def _fast_precisions(self) -> tuple[str, ...]:
        fast = self._memory.fast_dtypes
        return tuple(p for p in lower_precisions(self._model.parameters(), self._device) if p in fast)

    def timed(self, task: Task, profile: Profile, *, beside: Profile | None = None) -> Profile:
        """The profile with micro-batches timed that fit, and corrected by the memory they were seen to take. `beside`: one in
        another precision that has been timed; only its largest size runs again, as every size may keep kernels for good."""
        before = self._memory.budget()
        allowed = before.room - task.demand.standing - task.demand.standing_per_sample * task.demand.share
        wanted = self._worth_timing(task)
        if beside is not None:
            profile = replace(profile, excess=beside.excess)  # not known yet, but likely
            wanted = tuple(timing.samples for timing in beside.timings)[-1:] or wanted
        fitting = [n for n in wanted if profile.peak(n).upper <= allowed]
        if not fitting:  # what fits only when checkpointed is not run here
            return profile.with_timings((), self._optimizer_seconds(allowed))
        give_back_free_heap()
        try:
            timings = self._survivors(task, profile, fitting, allowed)
        except ValueError as error:
            self._no_singles = _needs_company(error) and fitting[-1] >= SAFE_FROM_SINGLES
            if not self._no_singles:
                raise
            timings = self._survivors(task, profile, [n for n in fitting if n >= SAFE_FROM_SINGLES], allowed)
        busy = busy_note(self._device)
        found = profile.with_timings(never_slower(timings) if busy else timings, self._optimizer_seconds(allowed))
        waste, kept = HIGH_HEAP_WASTE if self._scatters(found) else found.heap_waste, found.kept_per_size
        if beside is not None:  # libraries were there already, so that all that stayed are kernels for these sizes
            kept = max(kept, (self._memory.budget().held - before.held) // len(timings))
        return replace(found, heap_waste=waste, kept_per_size=kept, notes=(*found.notes, *busy, *self._ran_out))

    def _worth_timing(self, task: Task) -> tuple[int, ...]:
        share = min(task.demand.share, task.available)
        wanted = task.demand.micro_batch
        return micro_batch_sizes(share) if wanted is None else (min(wanted, share),)

    def _survivors(self, task: Task, profile: Profile, sizes: Sequence[int], allowed: int) -> tuple[Timing, ...]:
        """As `_timings`; where memory runs out all the same, of half the size, and nothing larger is planned from then on."""

        def smaller(text: str) -> tuple[Timing, ...]:
            self._most = max(sizes[0], sizes[-1] // 2)
            self._ran_out = (f"micro-batches of up to {sizes[-1]} ran out of memory while they were timed: {text}",)
            return self._survivors(task, profile, [n for n in sizes if n <= sizes[-1] // 2] or sizes[:1], allowed)

        if len(sizes) == 1:
            return self._timings(task, profile, sizes, allowed)
        return surviving(lambda: self._timings(task, profile, sizes, allowed), self._device, smaller)

    def _timings(self, task: Task, profile: Profile, sizes: Sequence[int], allowed: int) -> tuple[Timing, ...]:
        """Some of these sizes timed, from the smallest on as far as they fit."""
        reserved = self._memory.reserved
        work = task.real_work(profile.precision if profile.precision_is_lever else "off")
        watch = Stopwatch(self._model, self._staging, task.weighting, self._device, profile.blocks, reserved=reserved)
        # What a new size of micro-batch keeps shows in the second at the earliest; what was not timed is not used then.
        least, seconds = (2, 2 * TIMING_SECONDS) if reserved else (1, TIMING_SECONDS)

        def admit(size: int, found: tuple[Timing, ...]) -> bool:
            """Whether it still fits after what smaller sizes took beyond their trace, and kept."""
            corrected = profile.with_timings(found, 0.0)
            kept = corrected.kept_for((size,)) + sum(timing.kept for timing in found)
            return kept <= MOST_KEPT * allowed and corrected.peak(size).upper + kept <= allowed

        return time_sizes(watch, work, doubling(sizes), seconds, admit, least=least)

    def _optimizer_seconds(self, allowed: int) -> float:
        return optimizer_seconds(self._optimizer, self._device, limit=max(1 << 20, min(64 << 20, allowed // 16)))

    def avoid_singles(self) -> None:
        """Plan no sizes that leave a sample by itself: the model cannot run one."""
        self._no_singles = True

    def _of_possible(self, demand: Demand) -> Demand:
        """The demand without sizes that ran out of memory, nor those that leave a sample by itself where none can run so."""
        if demand.micro_batch is not None or (not self._no_singles and self._most is None):
            return demand
        least, most = SAFE_FROM_SINGLES if self._no_singles else 1, self._most or demand.share
        sizes = tuple(n for n in demand.sizes or micro_batch_sizes(demand.share) if least <= n <= most)
        return replace(demand, sizes=sizes or (least,))

    def _of_measured(self, demand: Demand, profile: Profile) -> Demand:
        """The demand with no other sizes than may run."""
        only = self._only_measured(profile)
        return replace(demand, sizes=only) if only and demand.micro_batch is None else demand

    def _only_measured(self, profile: Profile) -> tuple[int, ...]:
        """The sizes that have run, where kernels take what tensors do not show: how much for a size is known only then. Empty
        where any size may run: where freed memory goes back at once, a line through what was measured is near enough."""
        hides = self._scatters(profile)
        if self._memory.reserved:
            hides = profile.kept_per_size > HIDDEN_KEPT or _exceeds(profile)
        return tuple(timing.samples for timing in profile.timings) if hides else ()

    def _scatters(self, profile: Profile) -> bool:
        """Whether kernels take and free so much beside the tensors that a heap which keeps what was freed goes to pieces."""
        heap = self._device.type == "cpu" and not thresholds_pinned() and profile.timeline is not None
        return heap and _exceeds(profile, at_largest=True)

    def constrained(self, demand: Demand) -> Demand:
        """The demand with the levers the user prescribed."""
        settings = self._settings
        demand = replace(self._of_possible(demand), leftover=settings.leftover)
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
        )

def busy_note(device: torch.device, load: float | None = None) -> tuple[str, ...]:
    """What to say where other work took the processor while micro-batches were timed; `load` is the machine's, of the last
    minute."""
    cores = os.cpu_count() or 1
    if device.type != "cpu" or not hasattr(os, "getloadavg"):
        return ()
    load = os.getloadavg()[0] if load is None else load
    if load <= BUSY * cores:
        return ()
    return (
        f"the machine was busy while micro-batches were timed (load {load:.1f} on {cores} cores), so another size may be "
        "faster; where processes share cores, OMP_WAIT_POLICY=passive in the environment keeps threads from waiting in circles",
    )


def _exceeds(profile: Profile, *, at_largest: bool = False) -> bool:
    """Whether a micro-batch (the largest that ran) took much more than its tensors, or whether that is not known."""
    if profile.timeline is None or not profile.timings:
        return bool(profile.timings)
    seen = profile.excess[-1:] if at_largest else profile.excess
    return any(more > HIDDEN_SHARE * profile.timeline.growth(samples) for samples, more in seen)


def _needs_company(error: ValueError) -> bool:
    """Whether torch says that batch norm cannot take the statistics of a single value."""
    return "more than 1 value per channel" in str(error)


def _state_there(optimizer: Optimizer) -> int:
    """Bytes of the optimizer's state that exist already."""
    there = [v for state in optimizer.state.values() if isinstance(state, dict) for v in state.values()]
    return sum(v.numel() * v.element_size() for v in there if isinstance(v, torch.Tensor))
