"""Reconstructs the segments before a trace's first entry: the snapshot's segments with the whole trace undone.

The size of a block that was allocated before the trace and freed in it is not recorded. It is what its request rounds to. In
the large pool it extends to its neighbor if at most 1 MiB lies between them (no block there is smaller). If the gap is larger,
an unseen neighbor may lie in it: the rounded size is assumed, and counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from memfit.allocators.blocks import NO_POOL
from memfit.allocators.layout import BlockView, Kind, SegmentView
from memfit.allocators.rules import SMALL, SMALL_SEGMENT, rounded_size
from memfit.allocators.settings import AllocatorSettings
from memfit.allocators.snapshot import DeviceMemory, TraceEntry


class CannotUndo(Exception):
    """The start of a trace cannot be reconstructed; the message says why, and at which entry if one is at fault."""


@dataclass(frozen=True)
class Beginning:
    """The segments before a trace's first entry."""

    segments: tuple[SegmentView, ...]
    assumed: int
    """Number of blocks whose size is assumed."""
    lowest: Mapping[Kind, int]
    """The lowest address of each kind ever mapped in an expandable segment: its address space may begin there."""


def undo(memory: DeviceMemory, settings: AllocatorSettings, *, no_split: Collection[tuple[int, int]] = ()) -> Beginning:
    """Reconstruct the start of a device's trace. Raises CannotUndo if trace and segments contradict each other."""
    state = _Undoing(memory, settings)
    for at in range(len(memory.trace) - 1, -1, -1):
        state.undo(at, memory.trace[at])
    return state.beginning(no_split)


@dataclass
class _Block:
    requested: int
    state: str
    size: int | None
    freed_at: int
    """The entry that freed it; used only if the size is unknown."""


class _Undoing:
    """The segments and the blocks in use, while the trace is undone backwards."""

    def __init__(self, memory: DeviceMemory, settings: AllocatorSettings) -> None:
        self.memory, self.settings = memory, settings
        self.regions: dict[int, SegmentView] = {}
        self.starts: list[int] = []
        self.blocks: dict[int, _Block] = {}
        self.lowest: dict[Kind, int] = {}
        for segment in memory.segments:
            self._put(segment._replace(blocks=()))
            for block in segment.blocks:
                if block.state != "inactive":
                    self.blocks[block.address] = _Block(block.requested, block.state, block.size, 0)
        trace = memory.trace
        self.first_at = {trace[at].address: at for at in range(len(trace) - 1, -1, -1) if trace[at].action == "alloc"}
        self.handed_out = sorted(self.first_at)
        self.kinds = sorted(
            [(e.address, rounded_size(e.size, settings) <= SMALL) for e in trace if e.action == "alloc"]
            + [(block.address, segment.small) for segment in memory.segments for block in segment.blocks]
        )

    def undo(self, at: int, entry: TraceEntry) -> None:
        action, address = entry.action, entry.address
        if action == "alloc":
            if self.blocks.pop(address, None) is None:
                raise CannotUndo(f"entry {at} allocates at {address:#x}, and nothing is freed there later or left at the end")
        elif action == "free_completed":
            if address in self.blocks:
                raise CannotUndo(f"entry {at} frees {address:#x}, which is in use afterwards")
            self.blocks[address] = _Block(entry.size, "active_pending_free", None, at)
        elif action == "free_requested":
            if address not in self.blocks:
                raise CannotUndo(f"entry {at} frees {address:#x}, and when that was done is not in the trace")
            self.blocks[address].state = "active_allocated"
        elif action in ("segment_alloc", "segment_map"):
            self._remove(at, address, entry.size)
        elif action in ("segment_free", "segment_unmap"):
            self._add(entry, expandable=action == "segment_unmap")

    def _remove(self, at: int, address: int, size: int) -> None:
        """Remove the memory that an entry took."""
        place = bisect_right(self.starts, address) - 1
        region = self.regions[self.starts[place]] if place >= 0 else None
        if region is None or address + size > region.address + region.size:
            raise CannotUndo(f"entry {at} brings {size} bytes at {address:#x} that no segment has afterwards")
        del self.regions[region.address], self.starts[place]
        if region.expandable:
            self.lowest[region.kind] = min(address, self.lowest.get(region.kind, address))
        for start, end in ((region.address, address), (address + size, region.address + region.size)):
            if start < end:
                self._put(region._replace(address=start, size=end - start))

    def _add(self, entry: TraceEntry, *, expandable: bool) -> None:
        """Restore the memory that an entry released."""
        small = self._small_at(entry.address) if expandable else entry.size <= SMALL_SEGMENT
        pool_id = entry.pool_id or NO_POOL
        region = SegmentView(entry.address, entry.size, entry.stream, small, pool_id, expandable, ())
        if expandable:
            region = self._joined(region)
        self._put(region)

    def _joined(self, region: SegmentView) -> SegmentView:
        """Return the region merged with the mapped regions it touches."""
        place = bisect_left(self.starts, region.address)
        for neighbour in (place, place - 1):
            other = self.regions.get(self.starts[neighbour]) if 0 <= neighbour < len(self.starts) else None
            if other is None or not other.expandable or other.kind != region.kind:
                continue
            if other.address + other.size == region.address or region.address + region.size == other.address:
                del self.regions[other.address]
                self.starts.remove(other.address)
                region = region._replace(address=min(region.address, other.address), size=region.size + other.size)
        return region

    def _put(self, region: SegmentView) -> None:
        if region.expandable:
            self.lowest[region.kind] = min(region.address, self.lowest.get(region.kind, region.address))
        place = bisect_left(self.starts, region.address)
        near = [self.regions[start] for start in self.starts[max(place - 1, 0) : place + 1]]
        if any(each.address < region.address + region.size and region.address < each.address + each.size for each in near):
            raise CannotUndo(f"two segments hold {region.address:#x} at once")
        self.regions[region.address] = region
        self.starts.insert(place, region.address)

    def _small_at(self, address: int) -> bool:
        """Whether an expandable segment belongs to a small pool, as the block nearest to the address does."""
        place = bisect_left(self.kinds, (address, False))
        near = self.kinds[max(place - 1, 0) : place + 1]
        return min(near, key=lambda kind: abs(kind[0] - address))[1] if near else False

    def beginning(self, no_split: Collection[tuple[int, int]]) -> Beginning:
        """Return the segments, with the whole trace undone."""
        used, assumed, segments = sorted(self.blocks), 0, []
        for start in self.starts:
            region = self.regions[start]
            inside = used[bisect_left(used, start) : bisect_left(used, start + region.size)]
            views, at = [], start
            for place, address in enumerate(inside):
                bound = inside[place + 1] if place + 1 < len(inside) else start + region.size
                view, guessed = self._block(address, bound, region, region.pool_id in no_split)
                assumed += guessed
                views += _gap(at, address)
                views.append(view)
                at = address + view.size
            views += _gap(at, start + region.size)
            segments.append(region._replace(blocks=tuple(views)))
        if sum(each.state != "inactive" for segment in segments for each in segment.blocks) != len(used):
            raise CannotUndo("blocks are in use before the trace that no segment holds")
        return Beginning(tuple(segments), assumed, self.lowest)

    def _block(self, address: int, bound: int, region: SegmentView, whole: bool) -> tuple[BlockView, bool]:
        """Return the block at an address, which ends at `bound` at most, and whether its size is assumed."""
        block = self.blocks[address]
        size, guessed = block.size, False
        if size is None:
            bound = self._seen_before(address, bound, block.freed_at)
            size, guessed = self._size(block.requested, bound - address, region, whole)
        if address + size > bound:
            raise CannotUndo(f"{size} bytes at {address:#x} reach into the next block")
        return BlockView(address, size, block.requested, block.state), guessed

    def _seen_before(self, address: int, bound: int, freed_at: int) -> int:
        """Return the start of the next block that was allocated while this one was in use, or `bound`."""
        place = bisect_right(self.handed_out, address)
        while place < len(self.handed_out) and (other := self.handed_out[place]) < bound:
            if self.first_at[other] < freed_at:
                return other
            place += 1
        return bound

    def _size(self, requested: int, room: int, region: SegmentView, whole: bool) -> tuple[int, bool]:
        size = rounded_size(requested, self.settings)
        if whole or (not region.small and size >= self.settings.max_split_size):
            return room, False
        if region.small or region.expandable:
            return size, False
        return (room, False) if 0 < room - size <= SMALL else (size, room > size)


def _gap(start: int, end: int) -> list[BlockView]:
    return [BlockView(start, end - start, 0, "inactive")] if start < end else []
