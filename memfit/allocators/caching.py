"""Simulates the CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, torch 2.13) without a device.

Streams are numbers, and 0 is the default stream. A private pool is a pair of numbers. Not covered, because only a real process
knows: where a driver places segments (`driver`), the order in which streams are checked (`streams`), what other processes take.
"""

from __future__ import annotations

from collections.abc import Collection

from memfit._errors import UsageError
from memfit.allocators.blocks import LIVE, NEVER, NO_POOL, PENDING, Block, Pool, Shelf
from memfit.allocators.driver import Driver
from memfit.allocators.events import Exhausted, SegmentEvent
from memfit.allocators.expandable import best_reach, grow
from memfit.allocators.private import PoolId, PrivatePool, PrivatePools
from memfit.allocators.release import collect_garbage, release_oversize, release_pool
from memfit.allocators.rules import MIN_BLOCK, SMALL, rounded_size, segment_size
from memfit.allocators.settings import AllocatorSettings
from memfit.allocators.streams import StreamEvents


class CachingAllocator:
    """Simulates what a process reserves on a device for its allocations.

    `capacity`: bytes the driver has for this process, None for unlimited. A `per_process_memory_fraction` below 1 is a share of
    `device_memory` (bytes), which defaults to the capacity; one of the two must be given.
    """

    def __init__(
        self,
        settings: AllocatorSettings = AllocatorSettings(),  # noqa: B008 - frozen
        capacity: int | None = None,
        *,
        device_memory: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.driver = Driver(capacity) if driver is None else driver
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.heads: dict[int, Block] = {}
        """The first block of every segment, by address."""
        self.allocated = self.peak_allocated = 0
        """Bytes of allocated blocks, now and at the peak."""
        self.reserved = self.peak_reserved = 0
        """Bytes of segments, now and at the peak."""
        self.requested = 0
        """Bytes requested in the blocks that are allocated or pending."""
        self.pending = 0
        """Bytes of blocks that are freed but still used on another stream."""
        self.retries = self.failures = 0
        """Requests that released all cached memory, and requests that ran out of memory."""
        self.events: list[SegmentEvent] = []
        """Segment events, in order."""
        self._live: dict[int, Block] = {}
        self._stream_events = StreamEvents()
        self.private = PrivatePools(self._set_splitting)
        self._device_memory = device_memory if device_memory is not None else self.driver.capacity
        self.set_settings(settings)

    def set_settings(self, settings: AllocatorSettings) -> None:
        """Apply other settings, as torch.cuda.memory._set_allocator_settings does."""
        if settings.backend != "native":
            raise UsageError(
                f"the caching allocator with backend:{settings.backend}",
                found="that backend is the driver's own pool, whose rules are not public",
                next_move="omit the backend, or do not simulate",
            )
        self.settings = settings
        self.allowed = self._allowed_by(settings)
        self.collects = self.allowed is not None and settings.garbage_collection_threshold > 0
        self._rounds = settings.rounds_to_powers
        self._plain = settings.splits_everything and not self.collects and not settings.expandable_segments
        # Without expandable segments, blocks left from them serve no request: the search must skip them one by one.
        self._plain = self._plain and all(head.reservation is None for head in self.heads.values())
        for pool in self._pools():
            self._set_splitting(pool)

    def _allowed_by(self, settings: AllocatorSettings) -> int | None:
        if settings.per_process_memory_fraction == 1:
            return None
        if self._device_memory is None:
            raise UsageError(
                f"per_process_memory_fraction:{settings.per_process_memory_fraction:g}",
                found="the device's memory size is not given",
                next_move="pass device_memory= or capacity=",
            )
        return int(settings.per_process_memory_fraction * self._device_memory)

    def _set_splitting(self, pool: Pool) -> None:
        if pool.owner is not None and pool.owner.no_split:
            pool.split_from(NEVER)
        else:
            pool.split_from(MIN_BLOCK if pool.small or self.settings.expandable_segments else SMALL + 1)

    def _pools(self) -> list[Pool]:
        return [self.large, self.small, *(pool for each in self.private for pool in (each.small, each.large))]

    # ---- allocating

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate `size` bytes on the stream and return their address; 0 for no bytes. Raises Exhausted."""
        if size <= 0:
            return 0
        if self._stream_events:
            self.poll()
        rounded = rounded_size(size, self.settings) if self._rounds else (size + 511) & -512
        pool = self.small if rounded <= SMALL else self.large
        if self.private.routes:
            pool = self.private.routed(pool, stream)
        shelf = pool.shelves.get(stream) or pool.shelf(stream)
        if self.collects:
            pool.searches += 1
        at = shelf.best_fit(rounded) if self._plain else self.search(shelf, rounded)
        if at < len(shelf.blocks):
            del shelf.keys[at]
            block = shelf.blocks.pop(at)
        else:
            block = self._obtain(shelf, rounded)
        if block.size - rounded >= shelf.least_rest and (self._plain or self._may_split(shelf, rounded)):
            shelf.add(block.cut(rounded))
        self.hand_out(block, size)
        return block.address

    def hand_out(self, block: Block, size: int) -> None:
        """Mark a block that is off its shelf as allocated, for a request of `size` bytes."""
        block.state = LIVE
        block.requested = size
        self._live[block.address] = block
        self.requested += size
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def _may_split(self, shelf: Shelf, size: int) -> bool:
        """Whether a block may be split: small and expandable blocks always, others not for an oversize request."""
        return shelf.pool.small or self.settings.expandable_segments or size < self.settings.max_split_size

    def search(self, shelf: Shelf, size: int) -> int:
        """Return the index on the shelf of the block that serves a rounded size; past the end if there is none."""
        nothing = len(shelf.blocks)
        at = shelf.best_fit(size)
        if at == nothing:
            return nothing
        if shelf.blocks[at].reservation is not None:
            at = best_reach(shelf, at) if self.settings.expandable_segments else self._past_expandable(shelf, at)
        return at if at < nothing and self._fits(shelf.blocks[at].size, size) else nothing

    def _past_expandable(self, shelf: Shelf, at: int) -> int:
        while at < len(shelf.blocks) and shelf.blocks[at].reservation is not None:
            at += 1
        return at

    def _fits(self, block: int, size: int) -> bool:
        """Oversize blocks serve only oversize requests, and only if they do not waste too much."""
        limit = self.settings.max_split_size
        if size < limit:
            return block < limit
        return block < size + self.settings.max_non_split_rounding

    def _obtain(self, shelf: Shelf, size: int) -> Block:
        """Get a block from the driver. Releases cached memory if it is in the way."""
        if self.collects and self.allowed is not None:
            collect_garbage(self, self.allowed)
        block = self._new_block(shelf, size)
        if block is None and release_oversize(self, shelf, size):
            block = self._new_block(shelf, size)
        if block is None and not self.private.routes:
            self._release_all()
            self.retries += 1
            block = self._new_block(shelf, size)
        if block is None:
            self.failures += 1
            limits = [limit for limit in (self.allowed, self.driver.capacity) if limit is not None]
            capacity = min(limits) if limits else None
            raise Exhausted.of(size, allocated=self.allocated, reserved=self.reserved, capacity=capacity)
        return block

    def _new_block(self, shelf: Shelf, size: int) -> Block | None:
        segment = segment_size(size, self.settings)
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self.settings.expandable_segments:
            return grow(self, shelf, size)
        address = self.driver.allocate(segment)
        if address is None:
            return None
        block = self.heads[address] = Block(address, segment, shelf)
        self.took("segment_alloc", address, segment, shelf)
        return block

    def took(self, action: str, address: int, size: int, shelf: Shelf) -> None:
        """Record memory taken from the driver."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._note(action, address, size, shelf)

    def gave(self, action: str, address: int, size: int, shelf: Shelf) -> None:
        """Record memory returned to the driver."""
        self.reserved -= size
        self._note(action, address, -size, shelf)

    def _note(self, action: str, address: int, change: int, shelf: Shelf) -> None:
        if shelf.pool.owner is not None:
            shelf.pool.owner.held += change
        self.events.append(SegmentEvent(action, address, abs(change), shelf.stream, shelf.pool.pool_id))

    # ---- freeing

    def free(self, address: int) -> None:
        """Free the block that `malloc` returned; address 0 does nothing."""
        block = self._live.pop(address, None)
        if block is None:
            if address == 0:
                return
            raise self._nothing_at(address, "freeing")
        self.allocated -= block.size
        if block.uses:
            self._wait_for_uses(block)
        else:
            self.requested -= block.requested
            block.shelf.settle(block)

    def _nothing_at(self, address: int, doing: str) -> UsageError:
        return UsageError(
            f"{doing} address {address:#x}",
            found=f"none of the {len(self._live)} blocks that are allocated starts there",
            next_move="pass an address that malloc returned and that is not yet freed",
        )

    def _wait_for_uses(self, block: Block) -> None:
        block.state = PENDING
        self.pending += block.size
        self._stream_events.record(block, capturing=bool(self.private.routes))

    def used_on(self, address: int, stream: int) -> None:
        """Mark a block as used on another stream too (Tensor.record_stream): once freed, it waits for `complete`."""
        block = self._live.get(address)
        if block is None:
            raise self._nothing_at(address, "using")
        if stream != block.shelf.stream:
            self._stream_events.use(block, stream, capturing=bool(self.private.routes))

    def complete(self, stream: int) -> None:
        """Complete everything freed so far on that stream; the allocator notices at its next `malloc` or `poll`."""
        self._stream_events.complete(stream)

    def poll(self) -> None:
        """Free the pending blocks whose streams are done."""
        if self.private.routes:  # events cannot be queried during graph capture
            return
        self._take_back(self._stream_events.record_deferred())
        self._take_back(self._stream_events.finished())

    def _take_back(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.pending -= block.size
            self.requested -= block.requested
            block.shelf.settle(block)

    # ---- releasing to the driver

    def empty_cache(self, pool_id: PoolId = NO_POOL) -> None:
        """Release every unused segment, as torch.cuda.empty_cache does; a private pool's only once the pool is released."""
        if pool_id == NO_POOL:
            self._release_all()
            return
        private = self.private.known(pool_id)
        if private.users == 0:
            self._take_back(self._stream_events.record_deferred())
            self._take_back(self._stream_events.wait(lambda block: block.shelf.pool.owner is private))
            self._release_private(private)

    def _release_all(self) -> None:
        if not self.private.routes:
            self._take_back(self._stream_events.record_deferred())
            self._take_back(self._stream_events.wait(lambda block: True))
            release_pool(self, self.large)
            release_pool(self, self.small)
        for private in self.private:
            if private.users == 0:
                self._release_private(private)

    def _release_private(self, private: PrivatePool) -> None:
        release_pool(self, private.small)
        release_pool(self, private.large)
        if private.held == 0:
            self.private.drop(private)

    # ---- private pools

    def create_pool(self, pool_id: PoolId, *, no_split: bool = False) -> None:
        """Create a private pool (torch.cuda.MemPool), in use until `release_pool`; `no_split` keeps its blocks whole."""
        private = self.private.get(pool_id)
        private.users += 1
        if no_split:
            self.private.forbid_splitting(private)

    def begin_pool(self, pool_id: PoolId, *, streams: Collection[int] | None = None) -> None:
        """Route allocations (on `streams`, if given) to the private pool, as graph capture and use_mem_pool do."""
        self.private.begin(pool_id, streams)

    def end_pool(self, pool_id: PoolId) -> None:
        """Stop routing allocations to the pool; it stays in use."""
        self.private.end(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Drop one user of a private pool; without users its free segments may be released."""
        self.private.known(pool_id).users -= 1

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
