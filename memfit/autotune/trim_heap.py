"""Returns freed heap pages to the OS before they push the process over its budget (glibc as shipped, on the CPU).

glibc keeps what is freed below its thresholds, and micro-batches of changing shapes fragment that memory: it can reach twice
the tensors' bytes. `malloc_trim` returns whole free pages wherever they lie, but the process has to fault them in again. So it
runs only when the process comes near its budget: between micro-batches, between forward and backward (what a forward left free
may not suit its backward, which then comes on top), and before each block is recomputed. The allocator's settings stay the
user's. Not covered: other C libraries, fragmentation in between (HEAP_WASTE in `profiling/allocator.py` allows for it), proofs,
and the seconds that trimming takes.
"""

from __future__ import annotations

import os
import weakref

from memfit.hardware.heap import give_back_free_heap

_STATM = "/proc/self/statm"


class HeapWatch:
    """Returns free heap pages to the OS whenever the process holds more than `ceiling` bytes of anonymous memory."""

    def __init__(self) -> None:
        self.ceiling: int | None = None
        """None: nothing is checked."""
        self.given_back = 0
        """Times that pages were returned."""
        self._page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        self._open: tuple[int, int] | None = None

    def check(self) -> None:
        """Check the memory held and trim the heap if needed; takes two microseconds if not."""
        if self.ceiling is not None and self.held() > self.ceiling:
            give_back_free_heap()
            self.given_back += 1

    def held(self) -> int:
        """Return the bytes of anonymous memory."""
        try:
            _, resident, shared, *_ = os.pread(self._statm(), 256, 0).split()
        except OSError:
            self.ceiling = None
            return 0
        return (int(resident) - int(shared)) * self._page

    def _statm(self) -> int:
        """Return the open file: opening takes five times as long as reading. A forked process opens its own."""
        if self._open is None or self._open[0] != os.getpid():
            file = os.open(_STATM, os.O_RDONLY)
            self._open = os.getpid(), file
            weakref.finalize(self, os.close, file)
        return self._open[1]
