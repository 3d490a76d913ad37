"""From the tensors of a timeline to the memory a device holds for them.

CPU: pages that the C library asked the kernel for. With glibc as shipped, tensors below 32 MiB live in a heap that keeps
what was freed; with its thresholds pinned (MALLOC_MMAP_THRESHOLD_) freed memory goes back at once. CUDA: the caching
allocator's segments, by its rules of rounding, pools, best fit and splitting (c10/cuda/CUDACachingAllocator.cpp).
Not covered: scratch inside kernels, the CUDA context and libraries, expandable segments, several streams.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from memfit._units import MiB
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
CUDA_WORKSPACE = 2 * 8_519_680
"""cuBLAS keeps 8.125 MiB per handle and stream, one handle each for the forward and the backward thread
(aten/src/ATen/cuda/CublasHandlePool.cpp; 32 MiB each on sm_90)."""


@dataclass(frozen=True)
class Peak:
    """What a step needs on a device."""

    allocated: int
    """Bytes of tensors alive at once."""
    expected: int
    """Bytes the device is expected to hold for them."""
    upper: int
    """Bytes it may come to; a plan keeps this below the budget."""

    def plus(self, more: int) -> Peak:
        """The same with that many bytes beside the tensors."""
        return Peak(self.allocated, self.expected + more, self.upper + more)


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
        return Peak(allocated, allocated, allocated + int(waste * heap))
    if kind in ("cuda", "xpu"):
        workspace = 2 * 32 * MiB if capability is not None and capability[0] == 9 else CUDA_WORKSPACE
        reserved = reserved_peak(timeline, samples, accumulates) + workspace
        return Peak(allocated, reserved, reserved)
    return Peak(allocated, allocated, allocated + allocated // 8)


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


@dataclass
class _Pool:
    """Free blocks of one pool: (size, address), and the segments they lie in."""

    free: list[tuple[int, int]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Address of each free block to its size."""
    ends: dict[int, int] = field(default_factory=dict)
    """End of each free block to its address."""


_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _ROUND_LARGE = MiB, 2 * MiB, 20 * MiB, 2 * MiB


def reserved_peak(timeline: Timeline, samples: int, accumulates: bool = True) -> int:
    """Most bytes of segments the CUDA caching allocator reserves; segments are never given back in between."""
    sizes = timeline.sizes(samples).astype(np.int64)
    skip_from = skip_to = len(timeline.event)
    if not accumulates and len(timeline.window) > 1:
        skip_from = timeline.window[1]
        skip_to = next((p.start for p in timeline.phases if p.name == "hand over"), skip_from)
    caching = _Caching()
    for index, (which, born) in enumerate(zip(timeline.event.tolist(), timeline.birth.tolist())):
        if not skip_from <= index < skip_to:
            caching.allocate(which, int(sizes[which])) if born else caching.release(which)
    return caching.reserved


class _Caching:
    """The caching allocator on one stream, as far as sizes go. Segments lie far apart, so blocks never merge across them."""

    def __init__(self) -> None:
        self.reserved = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._held: dict[int, tuple[bool, int, int]] = {}
        self._next_address = 0

    def allocate(self, key: int, size: int) -> None:
        if size == 0:
            return
        size = -(-size // 512) * 512
        small = size <= _SMALL
        pool = self._pools[small]
        address, block = self._best_fit(pool, size) or self._new_segment(size)
        left = block - size
        if left >= 512 if small else left > _SMALL:
            _insert(pool, address + size, left)
            block = size
        self._held[key] = (small, address, block)

    def release(self, key: int) -> None:
        if key not in self._held:
            return
        small, address, size = self._held.pop(key)
        pool = self._pools[small]
        before = pool.ends.get(address)
        if before is not None:
            size += _remove(pool, before)
            address = before
        if address + size in pool.sizes:
            size += _remove(pool, address + size)
        _insert(pool, address, size)

    def _best_fit(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        at = bisect.bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        found, address = pool.free[at]
        _remove(pool, address)
        return address, found

    def _new_segment(self, size: int) -> tuple[int, int]:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _LARGE_SEGMENT // 2:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        self.reserved += segment
        address = self._next_address
        self._next_address += segment + 512  # a gap, so that neighbours in different segments never touch
        return address, segment


def _insert(pool: _Pool, address: int, size: int) -> None:
    bisect.insort(pool.free, (size, address))
    pool.sizes[address] = size
    pool.ends[address + size] = address


def _remove(pool: _Pool, address: int) -> int:
    size = pool.sizes.pop(address)
    del pool.ends[address + size]
    pool.free.pop(bisect.bisect_left(pool.free, (size, address)))
    return size
