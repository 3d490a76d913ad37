"""The result of comparing a replayed trace with the recorded one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.allocators.layout import SegmentView
from memfit.allocators.snapshot import DeviceMemory


@dataclass(frozen=True)
class Figure:
    """A byte count, as recorded and as replayed."""

    recorded: int
    replayed: int


@dataclass(frozen=True)
class Agreement:
    """Reports how far a replay agrees with the recorded trace."""

    identical: bool
    """Whether nothing differs: segments, addresses, and the blocks at the end."""
    difference: str
    """The first difference, as text; empty if there is none."""
    compared: int
    """Matching segment events (allocations and releases), up to the first difference."""
    allocations: int
    """Allocations at the same address, up to the first difference."""
    assumed: int
    """Blocks from before the trace whose size had to be assumed."""
    peak_reserved: Figure
    """Peak reserved bytes during the trace."""
    reserved: Figure
    """Reserved bytes at the end."""
    allocated: Figure
    """Allocated bytes at the end."""
    peak_allocated: int
    """Peak allocated bytes in the replay; a trace does not record them."""


def difference_at_end(recorded: Sequence[SegmentView], replayed: Sequence[SegmentView]) -> str:
    """Describe the first block or segment that differs at the end; empty if none does."""
    for was, now in zip(recorded, replayed):
        if (was.address, was.size) != (now.address, now.size):
            return f"at the end: recorded a segment of {was.size} bytes at {was.address:#x}; replayed: " + (
                f"{now.size} bytes at {now.address:#x}"
            )
        for old, new in zip(was.blocks, now.blocks):
            if (old.address, old.size, old.state) != (new.address, new.size, new.state):
                return f"at the end: recorded {old.size} bytes {old.state} at {old.address:#x}; replayed: " + (
                    f"{new.size} bytes {new.state} at {new.address:#x}"
                )
    if len(recorded) != len(replayed):
        return f"at the end: recorded {len(recorded)} segments; replayed: {len(replayed)}"
    return ""


def at_end(segments: Sequence[SegmentView]) -> tuple[int, int]:
    """Return the allocated and the reserved bytes."""
    blocks = [block for segment in segments for block in segment.blocks]
    allocated = sum(block.size for block in blocks if block.state == "active_allocated")
    return allocated, sum(segment.size for segment in segments)


def no_agreement(memory: DeviceMemory, difference: str) -> Agreement:
    """Return the result for a trace that cannot be replayed."""
    allocated, reserved = at_end(memory.segments)
    return Agreement(False, difference, 0, 0, 0, Figure(0, 0), Figure(reserved, 0), Figure(allocated, 0), 0)
