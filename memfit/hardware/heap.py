"""The C library's heap: giving free pages back to the kernel, and how much of it is free (glibc only).

Not covered: other C libraries, where nothing is given back and nothing counts as free.
"""

from __future__ import annotations

import ctypes
import sys


def give_back_free_heap() -> None:
    """Let the C library return the heap pages that are free, so that they do not count as held."""
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
    """Bytes of the heap that the C library holds and nobody uses; 0 where it does not tell."""
    if sys.platform != "linux":
        return 0
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)
