"""Giving freed heap pages back to the kernel before they push the process over its budget (glibc as shipped, on the CPU).

glibc keeps what was freed below its thresholds, and micro-batches of changing shapes fragment what it keeps: it can come to
twice the tensors. `malloc_trim` gives whole free pages back wherever they lie, at the price of faulting them in again, so
it is called only when the process comes near its budget: between micro-batches, between the forward and the backward of each
(what a forward left free may not serve its backward, which then comes on top), and before each block that is computed again.
The allocator's settings stay the user's. Not covered: other C libraries, what fragments in between (HEAP_WASTE in
`profiling/allocator.py` allows for that), proofs, and the seconds that giving back takes.
"""

from __future__ import annotations

import os
import weakref

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
        self._open: tuple[int, int] | None = None

    def check(self) -> None:
        """Look, and give back if need be; two microseconds where there is no need."""
        if self.ceiling is not None and self.held() > self.ceiling:
            give_back_free_heap()
            self.given_back += 1

    def held(self) -> int:
        """Bytes of anonymous memory."""
        try:
            _, resident, shared, *_ = os.pread(self._statm(), 256, 0).split()
        except OSError:
            self.ceiling = None
            return 0
        return (int(resident) - int(shared)) * self._page

    def _statm(self) -> int:
        """The open file, as opening it takes five times as long as reading; another one in a process that was forked since."""
        if self._open is None or self._open[0] != os.getpid():
            file = os.open(_STATM, os.O_RDONLY)
            self._open = os.getpid(), file
            weakref.finalize(self, os.close, file)
        return self._open[1]
