"""Computes what the C library takes for a step's tensors if its thresholds are pinned: whole pages, and a header each.

Not covered: glibc with its default settings, which keeps freed memory; autograd nodes and Python objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from memfit.profiling.allocator import HEAP_TENSOR, PAGE
from memfit.profiling.timeline import CATEGORIES, Timeline

IN_FRONT = 64
"""Bytes before a tensor: torch allocates at multiples of this (c10/core/alignment.h), behind glibc's header."""
_HELD_ANYWAY = [CATEGORIES.index(name) for name in ("parameters", "buffers")]


def in_pages(timeline: Timeline, samples: int, environ: Mapping[str, str] = os.environ) -> Timeline:
    """Returns the timeline of micro-batches of `samples`, with the bytes that tensors take in RAM. Tensors at or above the
    threshold are mapped individually and fill whole pages; the others lie in the heap with a header each.

    Parameters and buffers stay unchanged: they existed before, and the process already holds their overhead.
    """
    sizes = timeline.sizes(samples)
    threshold = int(environ.get("MALLOC_MMAP_THRESHOLD_", HEAP_TENSOR)) - IN_FRONT
    taken = np.where(sizes >= threshold, np.ceil((sizes + IN_FRONT) / PAGE) * PAGE, sizes + IN_FRONT * (sizes > 0))
    held = np.where(np.isin(timeline.category, _HELD_ANYWAY), sizes, taken)
    return replace(timeline, fixed=held, per_sample=np.zeros_like(sizes))
