"""Releases cached memory to the driver: old segments, oversize segments, or all unused segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.allocators.blocks import Block, Pool, Shelf
from memfit.allocators.expandable import unmap_pages

if TYPE_CHECKING:
    from memfit.allocators.caching import CachingAllocator


def release_segment(allocator: CachingAllocator, block: Block) -> None:
    """Release a segment that is one free block."""
    assert block.whole and block.reservation is None
    block.shelf.remove(block)
    del allocator.heads[block.address]
    allocator.driver.release(block.size)
    allocator.gave("segment_free", block.address, block.size, block.shelf)


def release_pool(allocator: CachingAllocator, pool: Pool) -> None:
    """Release every unused segment of a pool, then every whole page inside its free expandable blocks."""
    expandable = []
    for block in pool.in_order():
        if block.reservation is not None:
            expandable.append(block)
        elif block.whole:
            release_segment(allocator, block)
    for block in expandable:
        unmap_pages(allocator, block)


def oversize(allocator: CachingAllocator, shelf: Shelf, size: int) -> list[Block]:
    """Select the oversize blocks of the shelf to release for a request: enough to serve it, or all of them."""
    limit = allocator.settings.max_split_size
    wanted = max(size, limit)
    at = shelf.best_fit(wanted)
    if at < len(shelf.blocks) and shelf.blocks[at].reservation is None:
        return [shelf.blocks[at]]
    chosen, released = [], 0
    for block in reversed(shelf.blocks[:at]):
        if released >= wanted or block.size < limit:
            break
        if block.reservation is None:
            released += block.size
            chosen.append(block)
    return chosen


def release_oversize(allocator: CachingAllocator, shelf: Shelf, size: int) -> bool:
    """Release oversize blocks for a request, if max_split_size is set. Returns whether they are enough."""
    if allocator.settings.splits_everything:
        return False
    chosen = oversize(allocator, shelf, size)
    released = sum(block.size for block in chosen)
    for block in chosen:
        release_segment(allocator, block)
    return released >= max(size, allocator.settings.max_split_size)


def garbage(allocator: CachingAllocator, allowed: int) -> list[Block]:
    """Select the large segments that were free longest, until reserved memory falls to the garbage collection threshold."""
    target = allocator.reserved - int(allocator.settings.garbage_collection_threshold * allowed)
    pool = allocator.large
    aged = [(pool.searches - block.born, block) for block in pool.in_order() if block.whole]
    chosen: list[Block] = []
    total, count, found = sum(age for age, _ in aged), len(aged), True
    while target > 0 and found and count > 0:
        mean, found = total / count, False
        kept = []
        for age, block in aged:
            if block.reservation is not None or age < mean:
                kept.append((age, block))
                continue
            chosen.append(block)
            found, target, total, count = True, target - block.size, total - age, count - 1
        aged = kept
    return chosen


def collect_garbage(allocator: CachingAllocator, allowed: int) -> None:
    """Release the segments that were free longest."""
    for block in garbage(allocator, allowed):
        release_segment(allocator, block)
