"""The driver under the allocator: so many bytes of memory, handed out at addresses of its own choosing.

Not knowable without the process: where the driver puts a segment. Here each new one lies above all before it, on a boundary
of 2 MiB, and addresses are not used again; a real driver mostly does the same, and reuses what was given back as it likes.
Addresses decide between free blocks of the same size alone. Memory is counted in whole units of 2 MiB, as the driver does.
"""

from __future__ import annotations

from memfit._units import MiB

GRANULARITY = 2 * MiB
FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED_SPAN = 1 << 44
"""Address space of an expandable segment where nobody says how much memory there is."""


def whole_units(size: int) -> int:
    """`size` in the units memory is handed out in."""
    return -(-size // GRANULARITY) * GRANULARITY


class Driver:
    """Memory of `capacity` bytes (None: as much as is asked for)."""

    def __init__(self, capacity: int | None = None, *, first_address: int = FIRST_ADDRESS) -> None:
        self.capacity = capacity
        self.held = 0
        """Bytes handed out, in whole units."""
        self._next = first_address

    @property
    def free(self) -> int | None:
        """Bytes left; None where there is no end."""
        return None if self.capacity is None else self.capacity - self.held

    def allocate(self, size: int) -> int | None:
        """The address of a new segment, or None where there is no room."""
        if not self.back(size):
            return None
        return self.place(size)

    def release(self, size: int) -> None:
        """A segment's or pages' memory comes back."""
        self.held -= whole_units(size)

    def back(self, size: int) -> bool:
        """Take memory for pages or a segment, all of it or none."""
        units = whole_units(size)
        if self.capacity is not None and self.held + units > self.capacity:
            return False
        self.held += units
        return True

    def place(self, size: int) -> int:
        """An address with that much space behind it."""
        address = self._next
        self._next += whole_units(size)
        return address

    def avoid(self, end: int) -> None:
        """New segments lie above this address."""
        self._next = max(self._next, whole_units(end))

    def span(self, page: int) -> int:
        """Bytes of address space of an expandable segment: nine eighths of the memory, in whole pages."""
        room = UNLIMITED_SPAN if self.capacity is None else self.capacity + self.capacity // 8
        return -(-room // page) * page
