"""The caching allocator's laws over any course of allocations, and its pace."""

from __future__ import annotations

import itertools
import random
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings as effort, strategies as st

from memfit._units import KiB, MiB
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.events import Exhausted
from memfit.allocators.layout import Kind, adopt, layout_of
from memfit.allocators.rules import SMALL, rounded_size, segment_size
from memfit.allocators.settings import AllocatorSettings

CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:32",
    "expandable_segments:True,large_segment_size_mb:12",
    "max_split_size_mb:40,max_non_split_rounding_mb:64,roundup_power2_divisions:[1:2,>:8]",
]
ORDINARY = [conf for conf in CONFS if "expandable" not in conf]


class Step(NamedTuple):
    """One thing a program does: allocate, free (one of what is there), use elsewhere, be done elsewhere, empty the cache."""

    kind: str
    size: int
    which: int
    stream: int


KINDS = ["malloc"] * 8 + ["free"] * 7 + ["use", "complete"]
EDGES = [512, MiB, MiB + 1, 2 * MiB, 10 * MiB, 19 * MiB, 20 * MiB, 32 * MiB, 64 * MiB]
RANGES = [(1, 4 * KiB), (4 * KiB, MiB), (MiB + 1, 12 * MiB), (12 * MiB, 90 * MiB)]


def steps_of(seed: int, count: int) -> list[Step]:
    """A course of so many steps; where lists are drawn one by one they stay too short for memory to fall into pieces."""
    draws = random.Random(seed)
    streams = draws.choice([1, 3])
    sizes = [draws.choice(EDGES), draws.choice(EDGES), *(draws.randint(*draws.choice(RANGES)) for _ in range(6))]
    kinds = KINDS + ["empty"] * draws.choice([0, 1])
    return [
        Step(
            draws.choice(kinds),
            draws.choice(sizes) if draws.random() < 0.7 else draws.randint(*draws.choice(RANGES)),
            draws.randrange(10**6),
            draws.randrange(streams),
        )
        for _ in range(count)
    ]


STEPS = st.builds(steps_of, st.integers(0, 2**32), st.integers(1, 300))


def take(allocator: CachingAllocator, steps: Sequence[Step], alive: list[int]) -> list[int]:
    """Do the steps; the address of every allocation, 0 where there was no memory."""
    given_out = []
    for step in steps:
        if step.kind == "malloc":
            try:
                alive.append(allocator.malloc(step.size, step.stream))
                given_out.append(alive[-1])
            except Exhausted:
                given_out.append(0)
        elif step.kind == "free" and alive:
            allocator.free(alive.pop(step.which % len(alive)))
        elif step.kind == "use" and alive:
            allocator.used_on(alive[step.which % len(alive)], step.stream)
        elif step.kind == "complete":
            allocator.complete(step.stream)
        elif step.kind == "empty":
            allocator.empty_cache()
    return given_out


def check(allocator: CachingAllocator) -> None:
    """What holds at any time."""
    segments = layout_of(allocator)
    end = 0
    for segment in segments:
        assert segment.address >= end, "segments overlap"
        end = segment.address + segment.size
        states = [block.state for block in segment.blocks]
        assert ("inactive", "inactive") not in itertools.pairwise(states), "free neighbours are merged"
        at = segment.address
        for block in segment.blocks:
            assert block.address == at and block.size > 0
            at += block.size
        assert at == end
    blocks = [block for segment in segments for block in segment.blocks]
    assert allocator.reserved == sum(segment.size for segment in segments) <= allocator.peak_reserved
    assert allocator.allocated == sum(block.size for block in blocks if block.state == "active_allocated")
    assert allocator.pending == sum(block.size for block in blocks if block.state == "active_pending_free")
    assert allocator.requested == sum(block.requested for block in blocks if block.state != "inactive")
    assert allocator.allocated <= allocator.peak_allocated <= allocator.peak_reserved
    assert allocator.driver.held == allocator.reserved
    changes = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    assert allocator.reserved == sum(changes[event.action] * event.size for event in allocator.events)


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("capacity", [None, 150 * MiB])
@effort(max_examples=150, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_the_books_balance(conf: str, capacity: int | None, steps: list[Step]) -> None:
    allocator, alive = CachingAllocator(AllocatorSettings.from_text(conf), capacity), []
    for at in range(0, len(steps), 5):
        take(allocator, steps[at : at + 5], alive)
        check(allocator)
    for stream in range(3):
        allocator.complete(stream)
    for address in alive:
        allocator.free(address)
    allocator.empty_cache()
    check(allocator)
    assert (allocator.allocated, allocator.reserved, allocator.requested, allocator.pending) == (0, 0, 0, 0)


@pytest.mark.parametrize("conf", CONFS)
@effort(max_examples=100, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_the_same_course_gives_the_same_addresses(conf: str, steps: list[Step]) -> None:
    first, second = (CachingAllocator(AllocatorSettings.from_text(conf)) for _ in range(2))
    assert take(first, steps, []) == take(second, steps, [])
    assert first.events == second.events and layout_of(first) == layout_of(second)


# Without expandable segments, whose address space is nine eighths of the memory: where it ends depends on the capacity.
@pytest.mark.parametrize("conf", [conf for conf in CONFS if "expandable" not in conf])
@effort(max_examples=100, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_a_course_fits_into_its_own_peak(conf: str, steps: list[Step]) -> None:
    settings = AllocatorSettings.from_text(conf)
    free = CachingAllocator(settings)
    take(free, steps, [])
    capped = CachingAllocator(settings, free.peak_reserved)
    assert 0 not in take(capped, steps, [])
    assert capped.peak_reserved == free.peak_reserved and capped.retries == capped.failures == 0


@pytest.mark.parametrize("conf", CONFS)
@effort(max_examples=100, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_an_emptied_cache_holds_segments_in_use_alone(conf: str, steps: list[Step]) -> None:
    allocator = CachingAllocator(AllocatorSettings.from_text(conf))
    take(allocator, steps, [])
    allocator.empty_cache()
    for segment in layout_of(allocator):
        assert segment.expandable or any(block.state != "inactive" for block in segment.blocks)
    check(allocator)


@pytest.mark.parametrize("conf", CONFS)
@effort(max_examples=100, deadline=None, derandomize=True)
@given(steps=STEPS, more=STEPS)
def test_an_allocator_that_begins_with_anothers_segments_goes_on_as_that_one(
    conf: str, steps: list[Step], more: list[Step]
) -> None:
    settings = AllocatorSettings.from_text(conf)
    first, second, alive = CachingAllocator(settings), CachingAllocator(settings), []
    take(first, [step for step in steps if step.kind != "use"], alive)
    adopt(second, layout_of(first), beginnings(first))
    assert layout_of(second) == layout_of(first) and second.reserved == first.reserved
    first.events.clear()
    for allocator in (first, second):
        take(allocator, more, list(alive))
    assert [event[::2] for event in second.events] == [event[::2] for event in first.events]
    assert shape(second) == shape(first)


def beginnings(allocator: CachingAllocator) -> dict[Kind, int]:
    """Where every address space begins, which segments alone do not tell: their first pages may be unmapped."""
    shelves = {address: head.shelf for address, head in allocator.heads.items() if head.reservation is not None}
    return {(s.stream, s.pool.pool_id, s.pool.small): address for address, s in shelves.items()}


def shape(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    return [[(block.size, block.state) for block in segment.blocks] for segment in layout_of(allocator)]


# ---- a second, slower reading of the rules for segments that do not grow: flat lists, no links


class Plain:
    """Blocks in one list, every search a scan."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.blocks: list[list[int]] = []
        """Address, size, live, stream, segment, small."""
        self.reserved = self.peak = 0

    def malloc(self, size: int, stream: int) -> int:
        rounded = rounded_size(size, self.settings)
        small, limit = int(rounded <= SMALL), self.settings.max_split_size
        fits = [b for b in self.blocks if not b[2] and b[3] == stream and b[5] == small and b[1] >= rounded]
        block = min(fits, key=lambda b: (b[1], b[0]), default=None)
        if block is not None and rounded < limit <= block[1]:
            block = None
        if block is not None and limit <= rounded and block[1] >= rounded + self.settings.max_non_split_rounding:
            block = None
        if block is None:
            segment = segment_size(rounded, self.settings)
            block = [self.peak << 40 | len(self.blocks), segment, 0, stream, 0, small]
            block[0] = block[4] = max((b[4] for b in self.blocks), default=0) + (1 << 40)
            insort(self.blocks, block)
            self.reserved += segment
            self.peak = max(self.peak, self.reserved)
        rest = block[1] - rounded
        if rest >= 512 if small else (rounded < limit and rest > MiB):
            insort(self.blocks, [block[0] + rounded, rest, 0, *block[3:]])
            block[1] = rounded
        block[2] = 1
        return block[0]

    def free(self, address: int) -> None:
        at = next(at for at, block in enumerate(self.blocks) if block[0] == address)
        self.blocks[at][2] = 0
        for left in (at, at - 1):
            if 0 <= left < len(self.blocks) - 1:
                first, second = self.blocks[left : left + 2]
                if not first[2] and not second[2] and first[4] == second[4]:
                    first[1] += second[1]
                    del self.blocks[left + 1]


@pytest.mark.parametrize("conf", ORDINARY)
@effort(max_examples=150, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_a_second_reading_of_the_rules_places_every_block_alike(conf: str, steps: list[Step]) -> None:
    settings = AllocatorSettings.from_text(conf)
    allocator, plain = CachingAllocator(settings), Plain(settings)
    pairs: list[tuple[int, int]] = []
    for step in steps:
        if step.kind == "malloc":
            pairs.append((allocator.malloc(step.size, step.stream), plain.malloc(step.size, step.stream)))
        elif step.kind == "free" and pairs:
            mine, other = pairs.pop(step.which % len(pairs))
            allocator.free(mine)
            plain.free(other)
    assert (allocator.reserved, allocator.peak_reserved) == (plain.reserved, plain.peak)
    assert [block.size for segment in layout_of(allocator) for block in segment.blocks] == [b[1] for b in plain.blocks]
