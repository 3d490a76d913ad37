"""Estimates the memory a device holds for the tensors of a timeline.

CPU: pages that the C library requests from the kernel. With its default settings, glibc keeps freed tensors below 32 MiB in its
heap. With its thresholds pinned (MALLOC_MMAP_THRESHOLD_), freed memory goes back to the kernel at once. CUDA: segments of the
caching allocator (`memfit/allocators`), cuBLAS workspaces included. Not covered: other CUDA allocators; several streams.
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
"""Tensors this large never live in glibc's heap: its dynamic mmap threshold ends here (DEFAULT_MMAP_THRESHOLD_MAX)."""
HEAP_WASTE = 0.8
"""Upper bound of heap fragmentation: bytes the heap may keep beyond its tensors, as a share of their bytes. It assumes that
free pages are given back in time (`autotune/trim_heap.py`). Without that, benchmarks/heap.py measured 0.3 to 0.8 for models
whose samples have one size, and up to 2.1 with recomputed blocks and with samples of different sizes."""
HIGH_HEAP_WASTE = 2.0
"""The same where the reserved memory of the process is limited (RLIMIT_DATA, RLIMIT_AS), because pages given back still count
there. Also where kernels allocate much besides the tensors: 1.0 to 3.0 for an LSTM, its scratch memory included."""
WORKSPACE, WORKSPACE_SM90 = 8_519_680, 32 * MiB
"""Bytes that cuBLAS keeps per handle and stream: 8.125 MiB, or 32 MiB on data center cards since sm_90
(parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp). The forward and backward threads have a handle each."""
FINEST = 2 * MiB
"""Resolution of the search for the smallest budget, in bytes: the page size of the driver."""


@dataclass(frozen=True)
class Peak:
    """Peak memory of a step on a device, in bytes."""

    allocated: int
    """Most bytes of tensors alive at the same time."""
    expected: int
    """Bytes the device is expected to hold for them."""
    upper: int
    """Upper bound of the bytes it holds; a plan keeps this below the budget."""
    lower: int = 0
    """Lower bound: the device is unlikely to hold less."""
    reserved: int | None = None
    """Bytes of segments that the caching allocator requests from the driver; None without a caching allocator."""
    driver: int | None = None
    """Bytes that the driver reports for the process: reserved, context and libraries; None without a caching allocator."""
    narrowest: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    """Returns the fewest reserved bytes that are enough, where the allocator releases free segments under memory pressure."""

    @property
    def smallest_budget(self) -> int:
        """The smallest budget with which the step still completes, in bytes on the scale of `expected`. Under memory pressure
        the caching allocator releases free segments, so it may need less than it takes where memory is plentiful."""
        return self.expected if self.narrowest is None else self.narrowest() + self.expected - (self.reserved or 0)

    def plus(self, more: int) -> Peak:
        """Returns this peak with `more` bytes of memory outside tensors."""
        return replace(
            self,
            expected=self.expected + more,
            upper=self.upper + more,
            lower=self.lower + more,
            reserved=None if self.reserved is None else self.reserved + more,
            driver=None if self.driver is None else self.driver + more,
        )


    def within(self, interval: Interval) -> Peak:
        """Returns this peak with the calibrated bounds of `interval`."""
        held = self.expected if self.reserved is None else self.reserved
        lower, upper = int(interval.lower * held) + interval.lower_bytes, int(interval.upper * held) + interval.upper_bytes
        least = self.allocated if self.reserved is not None else 0  # segments hold at least the blocks in them
        return replace(self, lower=max(least, self.expected - lower), upper=self.upper + upper)


@dataclass(frozen=True)
class HeldMemory:
    """The most memory that a caching allocator holds in a step."""

    allocated: int
    """Most bytes of blocks allocated at the same time, workspaces included."""
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
    """Returns the peak of a step with micro-batches of `samples` on a device of this `kind` ("cpu", "cuda", ...). `waste` is
    what the heap of the C library may keep beyond its tensors, as a share of their bytes."""
    allocated = timeline.peak(samples, accumulates=accumulates)
    if kind == "cpu":
        heap = 0 if thresholds_pinned(environ) else heap_peak(timeline, samples, accumulates)
        return Peak(allocated, allocated, allocated + int(waste * heap), allocated)
    settings = AllocatorSettings.from_environment(environ) if kind == "cuda" else AllocatorSettings()
    # The fraction already bounds the budget (`hardware/driver.py`); the size of the device does not matter here.
    settings = replace(settings, per_process_memory_fraction=1.0)
    if kind in ("cuda", "xpu") and settings.backend == "native":
        held = caching_peak(timeline, samples, accumulates, capability=capability, settings=settings)
        narrowest = partial(smallest_capacity, timeline, samples, accumulates, capability, settings)
        reserved = held.reserved
        return Peak(held.allocated, reserved, reserved, held.allocated, reserved, reserved + CONTEXT, narrowest)
    return Peak(allocated, allocated, allocated + allocated // 8, allocated)


def thresholds_pinned(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the C library gives freed tensors back at once: the environment sets glibc's thresholds, to 1 MiB at most."""
    values = (environ.get("MALLOC_MMAP_THRESHOLD_"), environ.get("MALLOC_TRIM_THRESHOLD_"))
    return all(value is not None and value.isdigit() and int(value) <= MiB for value in values)


def heap_peak(timeline: Timeline, samples: int, accumulates: bool = True) -> int:
    """Returns the most bytes at once in tensors that the step allocates or frees and that are small enough for glibc's heap."""
    sizes = timeline.sizes(samples)
    start = timeline.phases[1].start if len(timeline.phases) > 1 else 0
    small = (sizes[timeline.event] < HEAP_TENSOR) & (np.arange(len(timeline.event)) >= start)
    signed = np.where(timeline.birth, sizes[timeline.event], -sizes[timeline.event])
    curve = np.cumsum(np.where(small, signed, 0.0))
    return int(curve.max(initial=0.0) - min(0.0, curve.min(initial=0.0)))


def mapped_swing(timeline: Timeline, samples: int) -> int:
    """Returns the most bytes at once, beyond those at the step's start, in tensors so large that glibc maps each separately."""
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
) -> HeldMemory:
    """Replays a step in the CUDA caching allocator, and returns its peaks. Raises Exhausted if `capacity` bytes are too few."""
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
    return HeldMemory(allocator.peak_allocated, allocator.peak_reserved)


def smallest_capacity(
    timeline: Timeline, samples: int, accumulates: bool, capability: tuple[int, int] | None, settings: AllocatorSettings
) -> int:
    """Returns the fewest bytes of segments with which the step completes, with a resolution of `FINEST`."""
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
    """Returns the bytes that each cuBLAS handle keeps on a device of this compute capability."""
    return WORKSPACE_SM90 if capability is not None and capability[0] in (9, 10) else WORKSPACE


def _take_workspaces(allocator: CachingAllocator, count: int, capability: tuple[int, int] | None) -> None:
    for _ in range(count):
        allocator.malloc(workspace_bytes(capability))


def _second_micro_batch(timeline: Timeline) -> range:
    """The events of the second micro-batch, which a step with a single micro-batch does not have."""
    if len(timeline.window) < 2:
        return range(0)
    start = timeline.window[1]
    return range(start, next((p.start for p in timeline.phases if p.name == "hand over"), start))
