"""From the tensors of a timeline to the memory a device holds for them.

CPU: pages that the C library asked the kernel for. With glibc as shipped, tensors below 32 MiB live in a heap that keeps
what was freed; with its thresholds pinned (MALLOC_MMAP_THRESHOLD_) freed memory goes back at once. CUDA: the caching
allocator's segments (`memfit/allocators`), with cuBLAS's workspaces in them. Not covered: other allocators than the caching
one; several streams.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from memfit._units import MiB
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.events import Exhausted
from memfit.allocators.settings import AllocatorSettings
from memfit.hardware.catalogue import CONTEXT
from memfit.profiling.intervals import Interval
from memfit.profiling.timeline import Timeline

PAGE = 4096
HEAP_TENSOR = 32 * MiB
"""Tensors from this size on never live in glibc's heap: its dynamic threshold stops here (DEFAULT_MMAP_THRESHOLD_MAX)."""
HEAP_WASTE = 0.8
"""How much of the tensors in the heap may be lost to what it keeps, beyond their own bytes, where free pages are given back
in time (`training/heap.py`). benchmarks/heap.py, where none are given back, saw 0.3 to 0.8 for models whose samples have one
size, up to 2.1 for blocks that are computed again and for samples of different sizes, where giving back matters."""
HIGH_HEAP_WASTE = 2.0
"""The same where what the process has reserved is limited (RLIMIT_DATA, RLIMIT_AS), as pages given back still count there;
and where kernels take much beside the tensors: an LSTM's 1.0 to 3.0, its scratch included."""
WORKSPACE, WORKSPACE_SM90 = 8_519_680, 32 * MiB
"""cuBLAS keeps 8.125 MiB per handle and stream, 32 on data centre cards since sm_90 (parseChosenWorkspaceSize in
aten/src/ATen/cuda/CublasHandlePool.cpp); the forward and the backward thread have a handle each."""
FINEST = 2 * MiB
"""Bytes to which the smallest budget is searched: the driver's pages."""


@dataclass(frozen=True)
class Peak:
    """What a step needs on a device, in bytes."""

    allocated: int
    """Bytes of tensors alive at once."""
    expected: int
    """Bytes the device is expected to hold for them."""
    upper: int
    """Bytes it may come to; a plan keeps this below the budget."""
    lower: int = 0
    """Bytes it will hardly stay below."""
    reserved: int | None = None
    """Bytes of the segments that the CUDA caching allocator takes from the driver; None where there is none."""
    driver: int | None = None
    """Bytes that the driver shows for the process: reserved, context and libraries; None where there is none."""
    narrowest: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    """Finds the least that is enough, where the allocator gives back what is free under pressure."""

    @property
    def smallest_budget(self) -> int:
        """Bytes, on the scale of `expected`, with which the step still completes: under pressure the caching allocator gives
        free segments back, so that it may need less than it takes where there is plenty."""
        return self.expected if self.narrowest is None else self.narrowest() + self.expected - (self.reserved or 0)

    def plus(self, more: int) -> Peak:
        """The same with that many bytes beside the tensors."""
        return replace(
            self,
            expected=self.expected + more,
            upper=self.upper + more,
            lower=self.lower + more,
            reserved=None if self.reserved is None else self.reserved + more,
            driver=None if self.driver is None else self.driver + more,
        )


    def within(self, interval: Interval) -> Peak:
        """The same with calibrated bounds."""
        held = self.expected if self.reserved is None else self.reserved
        lower, upper = int(interval.lower * held) + interval.lower_bytes, int(interval.upper * held) + interval.upper_bytes
        least = self.allocated if self.reserved is not None else 0  # whole segments hold no less than what lies in them
        return replace(self, lower=max(least, self.expected - lower), upper=self.upper + upper)


@dataclass(frozen=True)
class Held:
    """What a caching allocator came to hold in a step."""

    allocated: int
    """Most bytes of blocks handed out at once, workspaces included."""
    reserved: int
    """Most bytes of segments."""


def peak_on(
    kind: str,
    timeline: Timeline,
    samples: int,
    *,
    accumulates: bool = True,
    environ: Mapping[str, str] = os.environ,
    capability: tuple[int, int] | None = None,
    waste: float = HEAP_WASTE,
) -> Peak:
    """The peak of a step with micro-batches of `samples` on a device of this `kind` ("cpu", "cuda", ...); `waste` is how
    much of its heap the C library may keep beyond the tensors in it."""
    allocated = timeline.peak(samples, accumulates=accumulates)
    if kind == "cpu":
        heap = 0 if thresholds_pinned(environ) else heap_peak(timeline, samples, accumulates)
        return Peak(allocated, allocated, allocated + int(waste * heap), allocated)
    settings = AllocatorSettings.from_environment(environ) if kind == "cuda" else AllocatorSettings()
    # A share of the device bounds the budget already (`hardware/driver.py`), and how large the device is does not matter here.
    settings = replace(settings, per_process_memory_fraction=1.0)
    if kind in ("cuda", "xpu") and settings.backend == "native":
        held = caching_peak(timeline, samples, accumulates, capability=capability, settings=settings)
        narrowest = partial(smallest_capacity, timeline, samples, accumulates, capability, settings)
        reserved = held.reserved
        return Peak(held.allocated, reserved, reserved, held.allocated, reserved, reserved + CONTEXT, narrowest)
    return Peak(allocated, allocated, allocated + allocated // 8, allocated)


def thresholds_pinned(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the C library gives freed tensors back at once: glibc's thresholds set before start, and small."""
    values = (environ.get("MALLOC_MMAP_THRESHOLD_"), environ.get("MALLOC_TRIM_THRESHOLD_"))
    return all(value is not None and value.isdigit() and int(value) <= MiB for value in values)


def heap_peak(timeline: Timeline, samples: int, accumulates: bool = True) -> int:
    """Most bytes at once in tensors small enough to live in glibc's heap and that come and go."""
    sizes = timeline.sizes(samples)
    start = timeline.phases[1].start if len(timeline.phases) > 1 else 0
    small = (sizes[timeline.event] < HEAP_TENSOR) & (np.arange(len(timeline.event)) >= start)
    signed = np.where(timeline.birth, sizes[timeline.event], -sizes[timeline.event])
    curve = np.cumsum(np.where(small, signed, 0.0))
    return int(curve.max(initial=0.0) - min(0.0, curve.min(initial=0.0)))


def mapped_swing(timeline: Timeline, samples: int) -> int:
    """Most bytes at once, beyond what the step begins with, in tensors so large that glibc maps each by itself."""
    sizes = timeline.sizes(samples)
    start = timeline.phases[1].start if len(timeline.phases) > 1 else 0
    large = (sizes[timeline.event] >= HEAP_TENSOR) & (np.arange(len(timeline.event)) >= start)
    signed = np.where(timeline.birth, sizes[timeline.event], -sizes[timeline.event])
    return int(np.cumsum(np.where(large, signed, 0.0)).max(initial=0.0))


def caching_peak(
    timeline: Timeline,
    samples: int,
    accumulates: bool = True,
    *,
    capability: tuple[int, int] | None = None,
    settings: AllocatorSettings = AllocatorSettings(),  # noqa: B008 - frozen
    capacity: int | None = None,
    workspaces: int = 2,
) -> Held:
    """What the CUDA caching allocator comes to hold for a step. Raises Exhausted where `capacity` bytes are not enough."""
    allocator = CachingAllocator(settings, capacity)
    sizes = timeline.sizes(samples).astype(np.int64).tolist()
    events, births = timeline.event.tolist(), timeline.birth.tolist()
    skipped = range(0) if accumulates else _second_micro_batch(timeline)
    present = timeline.phases[1].start if len(timeline.phases) > 1 else len(events)
    addresses: dict[int, int] = {}
    for index, (which, born) in enumerate(zip(events, births)):
        if index == present:
            _take_workspaces(allocator, workspaces, capability)
        if index in skipped:
            continue
        if born:
            addresses[which] = allocator.malloc(sizes[which])
        elif addresses.get(which):
            allocator.free(addresses.pop(which))
    if present == len(events):
        _take_workspaces(allocator, workspaces, capability)
    return Held(allocator.peak_allocated, allocator.peak_reserved)


def smallest_capacity(
    timeline: Timeline, samples: int, accumulates: bool, capability: tuple[int, int] | None, settings: AllocatorSettings
) -> int:
    """The fewest bytes of segments with which the step completes, to `FINEST`."""
    simulate = partial(caching_peak, timeline, samples, accumulates, capability=capability, settings=settings)
    plenty = simulate()
    low, high = plenty.allocated // FINEST, -(-plenty.reserved // FINEST)
    while low < high:
        middle = (low + high) // 2
        try:
            simulate(capacity=middle * FINEST)
        except Exhausted:
            low = middle + 1
        else:
            high = middle
    return high * FINEST


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes that each cuBLAS handle keeps on a device of this compute capability."""
    return WORKSPACE_SM90 if capability is not None and capability[0] in (9, 10) else WORKSPACE


def _take_workspaces(allocator: CachingAllocator, count: int, capability: tuple[int, int] | None) -> None:
    for _ in range(count):
        allocator.malloc(workspace_bytes(capability))


def _second_micro_batch(timeline: Timeline) -> range:
    """The events of the second micro-batch, which a step with a single one has not."""
    if len(timeline.window) < 2:
        return range(0)
    start = timeline.window[1]
    return range(start, next((p.start for p in timeline.phases if p.name == "hand over"), start))
