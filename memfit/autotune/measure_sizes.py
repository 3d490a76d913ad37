"""Measures the seconds and the memory of a few micro-batch sizes, and derives which sizes may be planned.

Only sizes predicted to fit are run; on an out-of-memory error smaller sizes run instead. Not covered: sizes that fit only with
activation checkpointing, which are planned by composition.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from memfit.autotune.memory import Memory
from memfit.autotune.task import Task
from memfit.autotune.trim_heap import HeapWatch
from memfit.autotune.tuner import spread
from memfit.engine.recovery import surviving
from memfit.engine.staged import Staging
from memfit.hardware.exhausted import retry_on_oom
from memfit.hardware.heap import give_back_free_heap
from memfit.planning.search import Demand, micro_batch_sizes
from memfit.profiling.allocator import HIGH_HEAP_WASTE, heap_peak, thresholds_pinned
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import Timing, never_slower
from memfit.tracing.timing import Stopwatch, optimizer_seconds, time_sizes

TIMING_SECONDS = 0.8
"""Seconds for timing micro-batches while planning, doubled if kernels take much besides the tensors. Training goes on
measuring (`tune.py`)."""
MOST_KEPT = 0.1
"""Fraction of the room that kernels of sizes tried while planning may keep for good."""
HIDDEN_KEPT = 16 << 20
"""Bytes kept per size above which kernels are assumed to hide memory (transformers keep up to 8 MiB once, convolutions
40 MiB per size)."""
RESERVED_FOR_CONVOLUTION = 1600 << 10
"""Bytes that oneDNN reserves for a convolution's forward and backward kernels in the first micro-batch of each size. One
seventh becomes resident (torch 2.13, one thread: 1.05 MiB in a ResNet, 0.96 in ConvNeXt, 1.54 in a U-Net)."""
UNSEEN = 3
"""CPU kernels may take 1/UNSEEN of what a micro-batch adds beyond what smaller sizes showed (MKL packed one or two of six
matrices of 4,000 x 4,096, but none of the smaller ones)."""
BUSY = 1.5
"""Runnable processes per core above which timings count as disturbed (training alone makes it 1)."""
FAR = 2
"""If tracing failed, the largest planned size is at most FAR times the largest one that ran. Beyond that only a line through
measurements predicts its memory."""
SAFE_FROM_SINGLES = 3
"""Micro-batches of at least this many samples never leave a single sample over (at most 2: 3 = 2 + 1)."""

Result = TypeVar("Result")

Excess = tuple[tuple[int, int], ...]
"""(samples, bytes) by which measured micro-batches exceeded their trace, in ascending order."""


class Measurer:
    """Times the micro-batches of one model and optimizer, and remembers which sizes cannot run.

    Attribute: `no_singles` (whether the model cannot run a single sample, so that no size may leave one over).
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, memory: Memory, staging: Staging
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._memory, self._staging = memory, staging
        self.no_singles = False
        self._most: int | None = None
        """Largest size that may be planned, after a larger one ran out of memory."""
        self._ran_out: tuple[str, ...] = ()

    def timed(
        self, task: Task, profile: Profile, *, beside: Profile | None = None, thoroughly: bool = False
    ) -> Profile:
        """Times the micro-batch sizes that fit. Returns the profile with timings, corrected by the measured memory.

        `beside`: a timed profile in another precision. Then only its largest size runs again, since each size may keep kernels
        for good. `thoroughly`: without a trace, or if kernels take much besides the tensors, sizes run up to the largest,
        however long it takes."""
        before = self._memory.budget()
        allowed = before.room - task.demand.standing - task.demand.standing_per_sample * task.demand.share
        wanted = self._worth_timing(task)
        if beside is not None:
            profile = replace(profile, excess=beside.excess)  # a likely guess until measured
            wanted = tuple(timing.samples for timing in beside.timings)[-1:] or wanted
        fitting = [n for n in wanted if profile.peak(n).upper <= allowed]
        if not fitting:
            return self._untimed(profile, allowed)
        give_back_free_heap()
        try:
            timings = self._survivors(task, profile, fitting, allowed, thoroughly)
        except Exception as error:
            if not _needs_company(error):
                raise
            self.no_singles = True
            # A batch of two run whole leaves no single sample either.
            fitting = [n for n in fitting if n >= SAFE_FROM_SINGLES or 1 < n == task.demand.share]
            if not fitting:
                return self._untimed(profile, allowed)
            timings = self._survivors(task, profile, fitting, allowed, thoroughly)
        if not timings:
            return self._untimed(profile, allowed)
        busy = busy_note(self._device)
        found = profile.with_timings(never_slower(timings) if busy else timings, self._optimizer_seconds(allowed))
        waste, kept = HIGH_HEAP_WASTE if self._scatters(found) else found.heap_waste, found.kept_per_size
        if beside is not None:  # libraries are already loaded, so whatever stays allocated is kernels for these sizes
            kept = max(kept, (self._memory.budget().held - before.held) // len(timings))
            found = replace(found, excess=excess_beside(beside.excess, found.excess))
        return replace(found, heap_waste=waste, kept_per_size=kept, notes=(*found.notes, *busy, *self._ran_out))

    def _untimed(self, profile: Profile, allowed: int) -> Profile:
        """Return the profile if no size fits as it is. Sizes that fit only with checkpointing are not run here."""
        kept = 0
        if self._memory.reserved:  # an estimate of what a run would have shown
            kept = RESERVED_FOR_CONVOLUTION * sum(isinstance(module, _ConvNd) for module in self._model.modules())
        untimed = profile.with_timings((), self._optimizer_seconds(allowed))
        kept = max(profile.kept_per_size, kept)
        return replace(untimed, excess=profile.excess, kept_per_size=kept, notes=(*untimed.notes, *self._ran_out))

    def smallest(self, run: Callable[[int], Result]) -> Result:
        """Calls `run` with one sample, or with two if the model cannot run a single one."""
        if not self.no_singles:
            try:
                return run(1)
            except Exception as error:
                if not _needs_company(error):
                    raise
                self.no_singles = True
        return run(2)

    def _worth_timing(self, task: Task) -> tuple[int, ...]:
        share = min(task.demand.share, task.available)
        wanted = task.demand.micro_batch
        return micro_batch_sizes(share) if wanted is None else (min(wanted, share),)

    def _survivors(
        self, task: Task, profile: Profile, sizes: Sequence[int], allowed: int, thoroughly: bool
    ) -> tuple[Timing, ...]:
        """Run `_timings`. On an out-of-memory error retry with up to half the size, and plan no larger size from then on. A
        prescribed size is not replaced: it returns no timings, and training recovers on its own."""

        def smaller(text: str) -> tuple[Timing, ...]:
            self._most = max(sizes[0], sizes[-1] // 2)
            self._ran_out = (f"micro-batches of up to {sizes[-1]} ran out of memory while they were timed: {text}",)
            fewer = [n for n in sizes if n <= sizes[-1] // 2] or sizes[:1]
            return self._survivors(task, profile, fewer, allowed, thoroughly)

        def untimed(text: str) -> tuple[Timing, ...]:
            self._ran_out = (f"micro-batches of {sizes[0]} ran out of memory while they were timed: {text}",)
            return ()

        only = len(sizes) == 1
        if only and (task.demand.micro_batch is None or sizes[0] == 1):
            return retry_on_oom(lambda: self._timings(task, profile, sizes, allowed, thoroughly), self._device)
        otherwise = untimed if only else smaller
        return surviving(lambda: self._timings(task, profile, sizes, allowed, thoroughly), self._device, otherwise)

    def _timings(
        self, task: Task, profile: Profile, sizes: Sequence[int], allowed: int, thoroughly: bool
    ) -> tuple[Timing, ...]:
        """Time some of these sizes, in ascending order while they fit."""
        reserved = self._memory.reserved
        work = task.real_work(profile.precision if profile.precision_is_lever else "off")
        traced = profile.timeline is not None
        watch = Stopwatch(
            self._model,
            self._staging,
            task.weighting,
            self._device,
            profile.blocks,
            reserved=reserved,
            trimmed=not traced,
            make_room=self._giving_back(profile, allowed),
        )
        # What a new size keeps shows in the second size at the earliest, and untimed sizes are not planned then.
        least, seconds = (2, 2 * TIMING_SECONDS) if reserved else (1, TIMING_SECONDS)
        # Without a trace only measurements count, and the smallest sizes are too small for the OS kernel's memory counters.
        chosen = spread(sizes) if traced else spread(sizes, FAR * FAR)

        def admit(size: int, found: tuple[Timing, ...]) -> bool:
            """Whether the size still fits, given what smaller sizes took beyond their trace and kept."""
            corrected = profile.with_timings(found, 0.0)
            kept = corrected.kept_for((size,)) + sum(timing.kept for timing in found)
            unseen = corrected.added_by(size) // UNSEEN if self._device.type == "cpu" and traced else 0
            return kept <= MOST_KEPT * allowed and corrected.peak(size).upper + kept + unseen <= allowed

        def longer(found: tuple[Timing, ...]) -> bool:
            """If kernels take much, larger sizes measure it more accurately than a line through the smallest."""
            return _exceeds(profile.with_timings(found, 0.0))

        def regardless(found: tuple[Timing, ...]) -> bool:
            """A line for the kernels' memory per sample needs at least two sizes."""
            return (thoroughly or len(found) < 2) and longer(found)

        more = None if reserved else longer
        return time_sizes(watch, work, chosen, seconds, admit, least=least, longer=more, regardless=regardless)

    def _giving_back(self, profile: Profile, allowed: int) -> Callable[[int], int]:
        """Return a function that releases free pages of the C library's heap if a micro-batch would not fit beside them. It
        returns the bytes that they may grow to again."""
        timeline, heap = profile.timeline, HeapWatch()
        if timeline is None or self._device.type != "cpu" or self._memory.reserved or thresholds_pinned():
            return lambda samples: 0
        there = heap.held()

        def make_room(samples: int) -> int:
            heap.ceiling = there + max(0, allowed - profile.peak(samples).expected)
            before = heap.given_back
            heap.check()
            return int(profile.heap_waste * heap_peak(timeline, samples)) if heap.given_back > before else 0

        return make_room

    def _optimizer_seconds(self, allowed: int) -> float:
        """Time an optimizer step, or as much of it as memory allows."""
        seconds = partial(optimizer_seconds, self._optimizer, self._device)
        smallest = partial(retry_on_oom, partial(seconds, limit=1 << 20), self._device)
        return surviving(lambda: seconds(limit=max(1 << 20, min(64 << 20, allowed // 16))), self._device, lambda _: smallest())

    def possible(self, demand: Demand, measured: Profile | None = None) -> Demand:
        """Restricts the demand to sizes that may run, according to the timed profile if given."""
        if demand.micro_batch is not None:
            return replace(demand, micro_batch=SAFE_FROM_SINGLES) if self.leaves_one(demand) else demand
        wanted = self._only(measured) or demand.sizes or micro_batch_sizes(demand.share)
        wanted = tuple(n for n in wanted if self._is_near(n, measured)) or wanted[:1]
        sizes = tuple(n for n in wanted if self._can_run(n, demand.share)) or wanted
        return demand if sizes == micro_batch_sizes(demand.share) else replace(demand, sizes=sizes)

    def ran_out(self, samples: int) -> None:
        """Records that a micro-batch of `samples` ran out of memory: at most half of it is planned from now on."""
        self._most = max(1, min(self._most or samples, samples // 2))

    def leaves_one(self, demand: Demand) -> bool:
        """Whether the prescribed size leaves over a single sample that the model cannot run. Then one micro-batch has 3."""
        return self.no_singles and demand.micro_batch == 2 and demand.share % 2 == 1

    def may_run(self, size: int, measured: Profile) -> bool:
        """Whether micro-batches of this size may be planned, according to the timed profile."""
        return self._can_run(size, size) and self._is_near(size, measured) and size in (self._only(measured) or (size,))

    def _is_near(self, size: int, measured: Profile | None) -> bool:
        """Whether the measurements extend to this size; True if the profile is traced."""
        if measured is None or measured.source != "measured" or not measured.timings:
            return True
        return size <= FAR * measured.timings[-1].samples

    def _can_run(self, size: int, share: int) -> bool:
        """Whether this size neither ran out of memory nor leaves over a single sample that the model cannot run."""
        alone = size < SAFE_FROM_SINGLES and not 1 < size == share
        return size <= (self._most or size) and not (self.no_singles and alone)

    def _only(self, profile: Profile | None) -> tuple[int, ...]:
        """Return the sizes that have run if kernels take memory that tensors do not show, since only those are known. Empty if
        any size may run: if freed memory is returned at once, a line through the measurements suffices."""
        if profile is None:
            return ()
        hides = self._scatters(profile)
        if self._memory.reserved:
            hides = profile.kept_per_size > HIDDEN_KEPT or _exceeds(profile)
        return tuple(timing.samples for timing in profile.timings) if hides else ()

    def _scatters(self, profile: Profile) -> bool:
        """Whether kernels allocate and free so much besides the tensors that a heap that keeps freed memory fragments."""
        heap = self._device.type == "cpu" and not thresholds_pinned() and profile.timeline is not None
        return heap and _exceeds(profile, at_largest=True)


def excess_beside(own: Excess, lower: Excess) -> Excess:
    """Estimates what micro-batches in a second precision, measured at one size, take beyond their trace at every size.

    If it is less than the first precision's excess, it is the same fraction at every size (an LSTM in bfloat16: 0.60, 0.59 and
    0.55 of float32 at 2, 8 and 32 samples). If it is more, the difference is added. Without the first, it is proportional."""
    if not lower or not own:
        return ((0, 0), *lower) if lower else own
    last, there = lower[-1]
    at_last = next((more for samples, more in own if samples >= last), own[-1][1])
    if there < at_last:
        return tuple((samples, more * there // at_last) for samples, more in own)
    return tuple((samples, more + there - at_last) for samples, more in own)


def busy_note(device: torch.device, load: float | None = None) -> tuple[str, ...]:
    """Returns a note if other work kept the CPU busy during timing. `load` is the load average of the last minute."""
    cores = os.cpu_count() or 1
    if device.type != "cpu" or not hasattr(os, "getloadavg"):
        return ()
    load = os.getloadavg()[0] if load is None else load
    if load <= BUSY * cores:
        return ()
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    advice = "" if passive else (
        "; where processes share cores, OMP_WAIT_POLICY=passive in the environment keeps waiting threads off them"
    )
    return (
        f"the machine was busy while micro-batches were timed (load {load:.1f} on {cores} cores): timings are uncertain, and "
        f"another size may be faster{advice}",
    )


def _exceeds(profile: Profile, *, at_largest: bool = False) -> bool:
    """Whether a micro-batch (`at_largest`: the largest) took much more than its tensors, or whether that is not known."""
    if profile.timeline is None or not profile.timings:
        return bool(profile.timings)
    seen = profile.excess[-1:] if at_largest else profile.excess
    return any(profile.takes_much(samples, more) for samples, more in seen)


def _needs_company(error: Exception) -> bool:
    """Whether the error is batch norm's refusal to compute statistics of a single value."""
    return "more than 1 value per channel" in str(error)
