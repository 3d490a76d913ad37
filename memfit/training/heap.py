"""Giving freed heap pages back to the kernel before they push the process over its budget (glibc as shipped, on the CPU).

glibc keeps what was freed below its thresholds, and micro-batches of changing shapes fragment what it keeps: it can come to
twice the tensors. `malloc_trim` gives whole free pages back wherever they lie, at the price of faulting them in again, so
it is called only when the process comes near its budget: between micro-batches, and before each block that is computed again.
The allocator's settings stay the user's. Not covered: other C libraries, what fragments in between (HEAP_WASTE in
`profiling/allocator.py` allows for that), proofs, and the seconds that giving back takes.
"""

from __future__ import annotations

import os

from memfit.hardware.heap import give_back_free_heap

_STATM = "/proc/self/statm"


class HeapWatch:
    """Gives free heap pages back whenever the process holds more than `ceiling` bytes of anonymous memory."""

    def __init__(self) -> None:
        self.ceiling: int | None = None
        """None: nothing is looked at."""
        self.given_back = 0
        """How often it had to."""
        self._page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

    def check(self) -> None:
        """Look, and give back if need be; a few microseconds where there is no need."""
        if self.ceiling is not None and self.held() > self.ceiling:
            give_back_free_heap()
            self.given_back += 1

    def held(self) -> int:
        """Bytes of anonymous memory."""
        try:
            with open(_STATM, "rb", buffering=0) as file:
                _, resident, shared, *_ = file.read(256).split()
        except OSError:
            self.ceiling = None
            return 0
        return (int(resident) - int(shared)) * self._page
