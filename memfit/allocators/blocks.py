"""Memory blocks, and the free blocks of a pool in the order in which the allocator searches them.

A segment is a linked list of blocks in address order. The block at a segment's start stays the same object for as long as the
segment lives: a split keeps the front block, and a merge extends it over what follows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit._units import MiB
from memfit.allocators.rules import MIN_BLOCK

if TYPE_CHECKING:
    from memfit.allocators.expandable import Reservation
    from memfit.allocators.private import PrivatePool

FREE, LIVE, PENDING, UNMAPPED = range(4)
"""Block states: cached, allocated, freed but still used on another stream, or address space without memory behind it."""
ADDRESS_BITS = 57
"""Bits of an address. A size and an address form one sort key, with the size in the higher bits."""
NEVER = 1 << 62
"""A remainder so large that no block is split for it."""
NO_POOL = (0, 0)
"""The id of the default pools, which are not private."""


class Block:
    """A contiguous piece of a segment."""

    __slots__ = ("address", "born", "events", "next", "prev", "requested", "reservation", "shelf", "size", "state", "uses")

    def __init__(self, address: int, size: int, shelf: Shelf, reservation: Reservation | None = None) -> None:
        self.address = address
        self.size = size
        self.shelf = shelf
        self.reservation = reservation
        self.state = FREE
        self.prev: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.uses: set[int] | None = None
        self.events = 0
        self.born = 0

    def cut(self, size: int) -> Block:
        """Split the block after `size` bytes. Returns the remainder, linked behind this block and not on a shelf yet."""
        rest = Block(self.address + size, self.size - size, self.shelf, self.reservation)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Merge the next block, which must be off its shelf, into this one."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self

    @property
    def whole(self) -> bool:
        """Whether the block is the whole segment."""
        return self.prev is None and self.next is None

    def chain(self) -> Iterator[Block]:
        """Iterate over this block and all blocks after it."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next


class Shelf:
    """A free list: the free blocks of one pool and stream by size and then address, and the unmapped ones by address."""

    __slots__ = ("blocks", "keys", "least_rest", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.least_rest = pool.least_rest
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Put a free block on the shelf."""
        block.born = self.pool.searches
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        """Take a block off the shelf, because it is no longer free or its size is about to change."""
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[at]
        del self.blocks[at]

    def best_fit(self, size: int) -> int:
        """Return the index of the best fit for `size` bytes, at the lowest address among equals; may be past the end."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def settle(self, block: Block) -> Block:
        """Free a block: merge it with its free neighbors and put it on the shelf. Returns the merged block."""
        before, after = block.prev, block.next
        block.state = FREE
        if after is not None and after.state == FREE:
            self.remove(after)
            block.absorb_next()
        if before is not None and before.state == FREE:
            self.remove(before)
            before.absorb_next()
            block = before
        self.add(block)
        return block


class Pool:
    """Blocks of one kind, small or large, with one shelf per stream."""

    __slots__ = ("least_rest", "owner", "searches", "shelves", "small")

    def __init__(self, *, small: bool, owner: PrivatePool | None = None) -> None:
        self.small = small
        self.owner = owner
        self.shelves: dict[int, Shelf] = {}
        self.searches = 0
        self.least_rest = MIN_BLOCK if small else MiB + 1

    def shelf(self, stream: int) -> Shelf:
        """Return the stream's shelf, and create it if there is none."""
        found = self.shelves.get(stream)
        if found is None:
            found = self.shelves[stream] = Shelf(self, stream)
        return found

    def split_from(self, least_rest: int) -> None:
        """Split blocks only if at least `least_rest` bytes remain."""
        self.least_rest = least_rest
        for shelf in self.shelves.values():
            shelf.least_rest = least_rest

    def in_order(self) -> list[Block]:
        """Return the free blocks in the order in which memory is released: by stream, size and address."""
        return [block for stream in sorted(self.shelves) for block in self.shelves[stream].blocks]

    @property
    def pool_id(self) -> tuple[int, int]:
        """The id of the private pool, or `NO_POOL`."""
        return NO_POOL if self.owner is None else self.owner.pool_id
