"""Returns free pages of the C library's heap to the kernel, and reports how much of the heap is free (glibc only).

Not covered: other C libraries, where nothing is returned and nothing counts as free.
"""

from __future__ import annotations

import ctypes
import sys


def give_back_free_heap() -> None:
    """Return the heap's free pages to the kernel, so that they do not count as held."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3), since glibc 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def free_heap() -> int:
    """Return the unused bytes of the C library's heap; 0 if it does not report them."""
    if sys.platform != "linux":
        return 0
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)
