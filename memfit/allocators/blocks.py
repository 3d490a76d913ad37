"""Blocks of memory, and the free ones of a pool in the order in which they are searched.

A segment is a chain of blocks by address. The block at a segment's start is the same object for as long as the segment
lives: splitting leaves the front where it is, merging lets the front absorb what follows.
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
"""A block is cached, handed out, freed but still used on another stream, or address space without memory behind it."""
ADDRESS_BITS = 57
"""Bits of an address; sizes are compared before addresses, as one number."""
NEVER = 1 << 62
"""A rest so large that no block is split for it."""
NO_POOL = (0, 0)
"""The id of the pools that are not private."""


class Block:
    """A piece of a segment."""

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
        """Keep the first `size` bytes; the rest is a block of its own, linked behind, that is on no shelf yet."""
        rest = Block(self.address + size, self.size - size, self.shelf, self.reservation)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take the following block's bytes; it is on no shelf any more."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self

    @property
    def whole(self) -> bool:
        """Whether the block is its segment."""
        return self.prev is None and self.next is None

    def chain(self) -> Iterator[Block]:
        """This block and all behind it."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next


class Shelf:
    """The free blocks of one pool and stream, by size and then address; and the unmapped ones by address."""

    __slots__ = ("blocks", "keys", "least_rest", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.least_rest = pool.least_rest
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """A block is free from now on."""
        block.born = self.pool.searches
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        """A block is not free any more, or about to change its size."""
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[at]
        del self.blocks[at]

    def first_fit(self, size: int) -> int:
        """Where the smallest block of at least `size` bytes stands, the lowest address of several; may be past the end."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def settle(self, block: Block) -> Block:
        """Free a block: merged with its free neighbours and put on the shelf. Returns what it is part of."""
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
    """Blocks of one kind, small or large, with a shelf for every stream."""

    __slots__ = ("least_rest", "owner", "searches", "shelves", "small")

    def __init__(self, *, small: bool, owner: PrivatePool | None = None) -> None:
        self.small = small
        self.owner = owner
        self.shelves: dict[int, Shelf] = {}
        self.searches = 0
        self.least_rest = MIN_BLOCK if small else MiB + 1

    def shelf(self, stream: int) -> Shelf:
        """The free blocks of that stream."""
        found = self.shelves.get(stream)
        if found is None:
            found = self.shelves[stream] = Shelf(self, stream)
        return found

    def split_from(self, least_rest: int) -> None:
        """From now on a block is split where at least so many bytes are left over."""
        self.least_rest = least_rest
        for shelf in self.shelves.values():
            shelf.least_rest = least_rest

    def in_order(self) -> list[Block]:
        """The free blocks as they are gone through when memory is given back: by stream, size and address."""
        return [block for stream in sorted(self.shelves) for block in self.shelves[stream].blocks]

    @property
    def pool_id(self) -> tuple[int, int]:
        """The private pool's id."""
        return NO_POOL if self.owner is None else self.owner.pool_id
