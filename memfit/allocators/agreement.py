"""What comes out of holding a replay against what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.allocators.layout import SegmentView
from memfit.allocators.snapshot import DeviceMemory


@dataclass(frozen=True)
class Figure:
    """A number of bytes, as recorded and as replayed."""

    recorded: int
    replayed: int


@dataclass(frozen=True)
class Agreement:
    """How far a replay is what was recorded."""

    identical: bool
    """Whether nothing differs: segments, addresses, and the blocks at the end."""
    difference: str
    """The first difference in words; empty where there is none."""
    compared: int
    """Segments taken and given back that were the same, up to the first difference."""
    allocations: int
    """Allocations that lie at the same address, up to the first difference."""
    assumed: int
    """Blocks from before the trace whose size had to be assumed."""
    peak_reserved: Figure
    """Most bytes of segments at any time of the trace."""
    reserved: Figure
    """Bytes of segments at the end."""
    allocated: Figure
    """Bytes of blocks handed out at the end."""
    peak_allocated: int
    """Most bytes of blocks handed out at any time, replayed; a trace does not record it."""


def difference_at_end(recorded: Sequence[SegmentView], replayed: Sequence[SegmentView]) -> str:
    """The first block or segment that is another one, in words; empty where none is."""
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
    """Bytes of blocks handed out, and of the segments."""
    blocks = [block for segment in segments for block in segment.blocks]
    allocated = sum(block.size for block in blocks if block.state == "active_allocated")
    return allocated, sum(segment.size for segment in segments)


def no_agreement(memory: DeviceMemory, difference: str) -> Agreement:
    """The answer where nothing could be replayed."""
    allocated, reserved = at_end(memory.segments)
    return Agreement(False, difference, 0, 0, 0, Figure(0, 0), Figure(reserved, 0), Figure(allocated, 0), 0)
