"""The simulated driver below the allocator: a fixed amount of memory, handed out at addresses it chooses.

Not covered: where a real driver places a segment, which only the process knows. Here each new segment lies above all earlier
ones, on a 2 MiB boundary, and addresses are not reused. A real driver mostly does the same, but may reuse released addresses.
Addresses decide only between free blocks of the same size. Memory is counted in units of 2 MiB, as the driver counts it.
"""

from __future__ import annotations

from memfit._units import MiB

GRANULARITY = 2 * MiB
FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED_SPAN = 1 << 44
"""Address space of an expandable segment if the driver's memory is unlimited."""


def whole_units(size: int) -> int:
    """Round `size` up to the driver's granularity."""
    return -(-size // GRANULARITY) * GRANULARITY


class Driver:
    """Memory of `capacity` bytes (None: unlimited)."""

    def __init__(self, capacity: int | None = None, *, first_address: int = FIRST_ADDRESS) -> None:
        self.capacity = capacity
        self.held = 0
        """Bytes handed out, in whole units."""
        self._next = first_address

    @property
    def free(self) -> int | None:
        """Bytes left; None if unlimited."""
        return None if self.capacity is None else self.capacity - self.held

    def allocate(self, size: int) -> int | None:
        """Return the address of a new segment, or None if there is no room."""
        if not self.back(size):
            return None
        return self.place(size)

    def release(self, size: int) -> None:
        """Take back the memory of a segment or of pages."""
        self.held -= whole_units(size)

    def back(self, size: int) -> bool:
        """Take memory for pages or a segment, all of it or none. Returns whether there was enough."""
        units = whole_units(size)
        if self.capacity is not None and self.held + units > self.capacity:
            return False
        self.held += units
        return True

    def place(self, size: int) -> int:
        """Return an address with `size` bytes of address space behind it."""
        address = self._next
        self._next += whole_units(size)
        return address

    def avoid(self, end: int) -> None:
        """Place new segments above this address."""
        self._next = max(self._next, whole_units(end))

    def span(self, page: int) -> int:
        """Return the address space of an expandable segment in bytes: nine eighths of the memory, in whole pages."""
        room = UNLIMITED_SPAN if self.capacity is None else self.capacity + self.capacity // 8
        return -(-room // page) * page
