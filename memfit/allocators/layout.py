"""Represents an allocator's segments as plain values, as a snapshot shows them, and starts an allocator from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from memfit.allocators.blocks import FREE, LIVE, NO_POOL, PENDING, UNMAPPED, Block, Pool, Shelf
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.expandable import Reservation, map_pages, reserve
from memfit.allocators.rules import page_size

STATES = {FREE: "inactive", LIVE: "active_allocated", PENDING: "active_pending_free"}


Kind = tuple[int, tuple[int, int], bool]
_NOWHERE: Mapping[Kind, int] = {}


class BlockView(NamedTuple):
    """A block of a segment."""

    address: int
    size: int
    """Bytes."""
    requested: int
    """Bytes requested; for a free block 0, or in a snapshot its last request."""
    state: str
    """"inactive", "active_allocated" or "active_pending_free"."""


class SegmentView(NamedTuple):
    """A segment, or a mapped range of an expandable one."""

    address: int
    size: int
    """Bytes."""
    stream: int
    small: bool
    """Whether it belongs to a small pool."""
    pool_id: tuple[int, int]
    expandable: bool
    blocks: tuple[BlockView, ...]

    @property
    def kind(self) -> Kind:
        """What the segment belongs to: stream, private pool, and whether small."""
        return self.stream, self.pool_id, self.small


def layout_of(allocator: CachingAllocator) -> list[SegmentView]:
    """Return every segment with its blocks, by address."""
    stretches = [each for head in allocator.heads.values() for each in _stretches(head)]
    return sorted((_view(blocks) for blocks in stretches), key=lambda segment: segment.address)


def _stretches(head: Block) -> Iterator[list[Block]]:
    """Yield the mapped ranges of a chain, split at unmapped blocks."""
    run: list[Block] = []
    for block in head.chain():
        if block.state != UNMAPPED:
            run.append(block)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _view(blocks: list[Block]) -> SegmentView:
    first = blocks[0]
    views = tuple(BlockView(b.address, b.size, b.requested if b.state != FREE else 0, STATES[b.state]) for b in blocks)
    pool = first.shelf.pool
    expandable = first.reservation is not None
    size = sum(b.size for b in blocks)
    return SegmentView(first.address, size, first.shelf.stream, pool.small, pool.pool_id, expandable, views)


def adopt(allocator: CachingAllocator, segments: Iterable[SegmentView], lowest: Mapping[Kind, int] = _NOWHERE) -> None:
    """Start an empty allocator with these segments, at their addresses, as if it had allocated them.

    Pending blocks wait for events on a stream of their own, the negative of their address. The start of an expandable segment's
    address space is unknown: it is taken to be the lowest mapped address, or a lower one in `lowest`.
    """
    expandable: dict[Shelf, list[SegmentView]] = {}
    for segment in sorted(segments, key=lambda each: each.address):
        allocator.driver.avoid(segment.address + segment.size)
        shelf = _shelf(allocator, segment)
        if segment.expandable:
            expandable.setdefault(shelf, []).append(segment)
            continue
        head = Block(segment.address, segment.size, shelf)
        allocator.driver.back(segment.size)
        allocator.heads[segment.address] = head
        allocator.took("segment_alloc", segment.address, segment.size, shelf)
        shelf.add(head)
        _occupy(allocator, head, segment.blocks)
    for shelf, stretches in expandable.items():
        _adopt_expandable(allocator, shelf, stretches, lowest)
    allocator.events.clear()
    allocator.reset_peaks()


def _shelf(allocator: CachingAllocator, segment: SegmentView) -> Shelf:
    pool: Pool = allocator.small if segment.small else allocator.large
    if segment.pool_id != NO_POOL:
        private = allocator.private.get(segment.pool_id)
        pool = private.small if segment.small else private.large
    return pool.shelf(segment.stream)


def _adopt_expandable(
    allocator: CachingAllocator, shelf: Shelf, stretches: list[SegmentView], lowest: Mapping[Kind, int]
) -> None:
    page = page_size(small=shelf.pool.small, settings=allocator.settings)
    first = stretches[0].address
    base = min(first, lowest.get(stretches[0].kind, first))
    if (first - base) % page:
        base = first  # `lowest` is in another address space
    end = stretches[-1].address + stretches[-1].size
    span = max(allocator.driver.span(page), -(-(end - base) // page) * page)
    allocator.driver.avoid(base + span)
    rest = reserve(allocator, shelf, Reservation(base, page, span))
    for segment in stretches:
        rest = _unmapped_at(rest, segment.address)
        mapped = map_pages(allocator, rest, segment.size)
        assert mapped is not None
        after = mapped.next
        _occupy(allocator, mapped, segment.blocks)
        rest = after or mapped


def _unmapped_at(rest: Block, address: int) -> Block:
    """Return the part of an unmapped block that starts at `address`."""
    if rest.address == address:
        return rest
    part = rest.cut(address - rest.address)
    part.state = UNMAPPED
    rest.shelf.unmapped.insert(rest.shelf.unmapped.index(rest) + 1, part)
    return part


def _occupy(allocator: CachingAllocator, block: Block, views: tuple[BlockView, ...]) -> None:
    """Split a free block that is on its shelf into these blocks."""
    shelf = block.shelf
    shelf.remove(block)
    for at, view in enumerate(views):
        rest = block.cut(view.size) if at + 1 < len(views) else None
        if view.state == STATES[FREE]:
            shelf.add(block)
        else:
            allocator.hand_out(block, view.requested)
            if view.state == STATES[PENDING]:
                allocator.used_on(view.address, -view.address)
                allocator.free(view.address)
        block = rest or block
