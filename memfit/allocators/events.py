"""Segment events of the simulated allocator, and its out-of-memory error."""

from __future__ import annotations

from typing import Any, NamedTuple

from memfit._errors import MemfitError
from memfit._units import format_bytes

SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


class SegmentEvent(NamedTuple):
    """Memory taken from the driver or returned to it, named as in torch's own trace."""

    action: str
    """"segment_alloc", "segment_free", "segment_map" or "segment_unmap"."""
    address: int
    size: int
    """Bytes."""
    stream: int
    pool_id: tuple[int, int]
    """(0, 0), or the private pool's id."""


class Exhausted(MemfitError, RuntimeError):
    """Out of memory: no cached block and no new segment can serve a request, even after all cached memory is released."""

    def __init__(
        self, asked: str, *, found: str, next_move: str, figures: tuple[int, int, int, int | None] = (0, 0, 0, None)
    ) -> None:
        super().__init__(asked, found=found, next_move=next_move)
        self.size, self.allocated, self.reserved, self.capacity = figures

    @classmethod
    def of(cls, size: int, *, allocated: int, reserved: int, capacity: int | None) -> Exhausted:
        """Build the error for a request of `size` bytes; `capacity` is the known limit of reserved bytes, if any."""
        limit = "the driver refuses more" if capacity is None else f"{format_bytes(capacity)} may be reserved"
        return cls(
            f"{format_bytes(size)} more ({size} bytes)",
            found=f"{format_bytes(allocated)} are allocated, {format_bytes(reserved)} reserved, and {limit}; "
            f"{format_bytes(reserved - allocated)} of reserved memory is free in blocks that do not fit",
            next_move="a smaller micro-batch; expandable_segments:True against fragmentation",
            figures=(size, allocated, reserved, capacity),
        )

    def __reduce__(self) -> Any:
        return _rebuild, (self.asked, self.found, self.next_move, (self.size, self.allocated, self.reserved, self.capacity))


def _rebuild(asked: str, found: str, next_move: str, figures: tuple[int, int, int, int | None]) -> Exhausted:
    return Exhausted(asked, found=found, next_move=next_move, figures=figures)
