"""Expandable segments: address space is reserved once, and memory is mapped into it page by page.

Not covered: pages of an odd number of MiB (`large_segment_size_mb:21`), which a real driver may refuse to create.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from memfit.allocators.blocks import FREE, UNMAPPED, Block, Shelf
from memfit.allocators.rules import page_size

if TYPE_CHECKING:
    from memfit.allocators.caching import CachingAllocator


class Reservation:
    """The address space of one expandable segment."""

    __slots__ = ("base", "page", "span")

    def __init__(self, base: int, page: int, span: int) -> None:
        self.base, self.page, self.span = base, page, span

    def page_before(self, address: int) -> int:
        """Return the page boundary at or below an address."""
        return address - (address - self.base) % self.page

    def page_after(self, address: int) -> int:
        """Return the page boundary at or above an address."""
        return address + (self.base - address) % self.page


def _by_address(block: Block) -> int:
    return block.address


def reach(block: Block) -> int:
    """Return the bytes a free block can grow to without another block's memory."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def best_reach(shelf: Shelf, at: int) -> int:
    """Starting at the best fit, move to the next block as long as it can grow to strictly less."""
    blocks = shelf.blocks
    while blocks[at].reservation and at + 1 < len(blocks) and reach(blocks[at + 1]) < reach(blocks[at]):
        at += 1
    return at


def grow(allocator: CachingAllocator, shelf: Shelf, size: int) -> Block | None:
    """Return a free block of at least `size` bytes at the lowest address with room, off its shelf; None if memory runs out.

    Pages mapped before memory ran out stay mapped, as in torch.
    """
    found = _lowest_room(allocator, shelf, size)
    block = map_pages(allocator, found, min(found.size, size)) if found.state == UNMAPPED else found
    while block is not None and block.size < size:
        after = block.next
        assert after is not None and after.state == UNMAPPED
        block = map_pages(allocator, after, min(size - block.size, after.size))
    if block is not None:
        shelf.remove(block)
    return block


def _lowest_room(allocator: CachingAllocator, shelf: Shelf, size: int) -> Block:
    for block in shelf.unmapped:
        before = block.prev
        start = before if before is not None and before.state == FREE else block
        if _has_room(start, size):
            return start
    page = page_size(small=shelf.pool.small, settings=allocator.settings)
    span = allocator.driver.span(page)
    reservation = Reservation(allocator.driver.place(span), page, span)
    return reserve(allocator, shelf, reservation)


def _has_room(block: Block, size: int) -> bool:
    room = 0
    for each in block.chain():
        if room >= size or each.state not in (FREE, UNMAPPED):
            break
        room += each.size
    return room >= size


def reserve(allocator: CachingAllocator, shelf: Shelf, reservation: Reservation) -> Block:
    """Add the address space as one unmapped block."""
    block = Block(reservation.base, reservation.span, shelf, reservation)
    block.state = UNMAPPED
    insort(shelf.unmapped, block, key=_by_address)
    allocator.heads[block.address] = block
    return block


def map_pages(allocator: CachingAllocator, block: Block, size: int) -> Block | None:
    """Map the first `size` bytes of an unmapped block, in whole pages. Returns the free block they join, if memory suffices."""
    reservation, shelf = block.reservation, block.shelf
    assert reservation is not None and block.state == UNMAPPED
    start = block.address
    mapped = reservation.page_after(start + size) - start
    if not allocator.driver.back(mapped):
        return None
    shelf.unmapped.remove(block)
    if mapped < block.size:
        rest = block.cut(mapped)
        rest.state = UNMAPPED
        insort(shelf.unmapped, rest, key=_by_address)
    settled = shelf.settle(block)
    allocator.took("segment_map", start, mapped, shelf)
    return settled


def unmap_pages(allocator: CachingAllocator, block: Block) -> None:
    """Release the whole pages inside a free block; the remainders at its edges stay free."""
    reservation, shelf = block.reservation, block.shelf
    assert reservation is not None
    start = reservation.page_after(block.address)
    end = reservation.page_before(block.address + block.size)
    if start >= end:
        return
    shelf.remove(block)
    if start > block.address:
        middle = block.cut(start - block.address)
        shelf.add(block)
        block = middle
    if end - start < block.size:
        shelf.add(block.cut(end - start))
    block = _unmapped(shelf, block)
    allocator.driver.release(end - start)
    allocator.gave("segment_unmap", start, end - start, shelf)
    if block.whole:
        shelf.unmapped.remove(block)
        del allocator.heads[block.address]


def _unmapped(shelf: Shelf, block: Block) -> Block:
    """Mark a block as unmapped, and merge it with its unmapped neighbors."""
    block.state = UNMAPPED
    before, after = block.prev, block.next
    if after is not None and after.state == UNMAPPED:
        shelf.unmapped.remove(after)
        block.absorb_next()
    if before is not None and before.state == UNMAPPED:
        before.absorb_next()
        return before
    insort(shelf.unmapped, block, key=_by_address)
    return block
