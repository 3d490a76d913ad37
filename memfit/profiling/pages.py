"""What the C library takes for a step's tensors where its thresholds are pinned: whole pages, and a header for each.

Not covered: glibc as shipped, which keeps what was freed; nodes of the graph and Python's own objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from memfit.profiling.allocator import HEAP_TENSOR, PAGE
from memfit.profiling.timeline import CATEGORIES, Timeline

IN_FRONT = 64
"""Bytes before a tensor: torch asks for memory at multiples of these (c10/core/alignment.h), behind glibc's header."""
_HELD_ANYWAY = [CATEGORIES.index(name) for name in ("parameters", "buffers")]


def in_pages(timeline: Timeline, samples: int, environ: Mapping[str, str] = os.environ) -> Timeline:
    """The timeline of micro-batches of `samples`, its bytes as they lie in RAM: tensors from the threshold on are mapped each
    by itself and fill whole pages, the others lie in the heap between their headers.

    Parameters and buffers stay as they are: they were there before, and what they take beside is held anyway.
    """
    sizes = timeline.sizes(samples)
    threshold = int(environ.get("MALLOC_MMAP_THRESHOLD_", HEAP_TENSOR)) - IN_FRONT
    taken = np.where(sizes >= threshold, np.ceil((sizes + IN_FRONT) / PAGE) * PAGE, sizes + IN_FRONT * (sizes > 0))
    held = np.where(np.isin(timeline.category, _HELD_ANYWAY), sizes, taken)
    return replace(timeline, fixed=held, per_sample=np.zeros_like(sizes))
