"""The caching allocator rule by rule, with numbers made by hand (c10/cuda/CUDACachingAllocator.cpp of torch 2.13)."""

from __future__ import annotations

import ctypes
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit._errors import UsageError
from memfit._units import GiB, KiB, MiB
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.driver import Driver
from memfit.allocators.events import Exhausted
from memfit.allocators.layout import layout_of
from memfit.allocators.rules import rounded_size, segment_size
from memfit.allocators.settings import INTERVALS, UNLIMITED, AllocatorSettings

SIDE, OTHER = 7, 9
POOL = (1, 0)


def conf(text: str) -> AllocatorSettings:
    return AllocatorSettings.from_text(text)


def with_conf(text: str, capacity: int | None = None, *, device_memory: int | None = None) -> CachingAllocator:
    return CachingAllocator(conf(text), capacity, device_memory=device_memory)


def actions(allocator: CachingAllocator) -> list[tuple[str, int]]:
    return [(event.action, event.size) for event in allocator.events]


def blocks(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    return [[(block.size, block.state) for block in segment.blocks] for segment in layout_of(allocator)]


def waste(allocator: CachingAllocator) -> int:
    return allocator.reserved - allocator.allocated


# ---- sizes


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512), (3 * GiB, 3 * GiB)]
)
def test_requests_are_rounded_to_512_bytes(size: int, rounded: int) -> None:
    assert rounded_size(size, AllocatorSettings()) == rounded
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert (allocator.requested, allocator.allocated) == (size, rounded)


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200 * KiB, 4, 1280 * KiB),  # 1024, 1280, 1536, 1792
        (1024 * KiB, 4, 1024 * KiB),
        (1280 * KiB + 1, 4, 1536 * KiB),
        (1800 * KiB, 4, 2048 * KiB),
        (1200 * KiB, 1, 1200 * KiB),
        (1200 * KiB, 2, 1536 * KiB),
        (2048, 4, 2048),  # not more than 512 x 4
        (2049, 4, 2560),
        (3 * GiB + 1, 8, 3 * GiB + 256 * MiB),
    ],
)
def test_powers_of_two_are_cut_into_divisions(size: int, divisions: int, rounded: int) -> None:
    assert rounded_size(size, conf(f"roundup_power2_divisions:{divisions}")) == rounded


def test_each_power_of_two_has_its_own_divisions_and_the_ends_reach_further() -> None:
    settings = conf("roundup_power2_divisions:[1:2,2:4,>:8]")
    assert rounded_size(100 * KiB, settings) == 128 * KiB  # below 1 MiB: as 1 MiB
    assert rounded_size(1200 * KiB, settings) == 1536 * KiB
    assert rounded_size(2400 * KiB, settings) == 2560 * KiB
    assert rounded_size(4200 * KiB, settings) == 4608 * KiB
    assert rounded_size(65 * GiB, settings) == 72 * GiB  # above 64 GiB: as 32 GiB


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (63 * MiB, 64 * MiB),
    ],
)
def test_segments_have_one_of_three_sizes(rounded: int, segment: int) -> None:
    assert segment_size(rounded, AllocatorSettings()) == segment
    allocator = CachingAllocator()
    allocator.malloc(rounded)
    assert actions(allocator) == [("segment_alloc", segment)] and allocator.reserved == segment


def test_the_large_segment_may_have_another_size() -> None:
    allocator = with_conf("large_segment_size_mb:64")
    allocator.malloc(2 * MiB)
    allocator.malloc(12 * MiB)
    assert allocator.reserved == 64 * MiB


# ---- pools and search


def test_small_and_large_never_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(8 * MiB))
    allocator.malloc(MiB)
    assert allocator.reserved == 22 * MiB
    allocator.free(allocator.malloc(512))
    allocator.malloc(MiB + 1)
    assert allocator.reserved == 22 * MiB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    sizes = [40 * MiB, 20 * MiB, 30 * MiB]
    large, small, middle = (allocator.malloc(size) for size in sizes)
    for address in (large, small, middle):
        allocator.free(address)
    assert [allocator.malloc(size) for size in (25 * MiB, 18 * MiB, 33 * MiB)] == [middle, small, large]


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    addresses = [allocator.malloc(32 * MiB) for _ in range(4)]
    for address in (addresses[2], addresses[0], addresses[3], addresses[1]):
        allocator.free(address)
    assert [allocator.malloc(32 * MiB) for _ in range(4)] == addresses == sorted(addresses)


def test_new_segments_lie_above_the_others_on_boundaries_of_two_mib() -> None:
    allocator = CachingAllocator()
    addresses = [allocator.malloc(size) for size in (1, 3 * MiB, 30 * MiB, 100 * MiB)]
    assert addresses == sorted(addresses) and not any(address % (2 * MiB) for address in addresses)


def test_streams_never_share() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(20 * MiB, stream=0)
    allocator.free(first)
    assert allocator.malloc(20 * MiB, stream=SIDE) != first
    assert allocator.malloc(20 * MiB, stream=0) == first


# ---- splitting and merging


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.malloc(MiB)
    allocator.malloc(MiB - 512)
    assert blocks(allocator) == [[(MiB, "active_allocated"), (MiB - 512, "active_allocated"), (512, "inactive")]]
    allocator.malloc(512)
    assert waste(allocator) == 0 and len(allocator.events) == 1


@pytest.mark.parametrize(("rest", "allocated"), [(MiB, 20 * MiB), (MiB + 512, 19 * MiB - 512)])
def test_a_large_block_keeps_a_rest_of_up_to_one_mib(rest: int, allocated: int) -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MiB))
    allocator.malloc(20 * MiB - rest)
    assert allocator.allocated == allocated


def test_the_front_is_handed_out_and_the_rest_stays_free() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(3 * MiB)
    assert allocator.malloc(4 * MiB) == first + 3 * MiB
    assert blocks(allocator) == [[(3 * MiB, "active_allocated"), (4 * MiB, "active_allocated"), (13 * MiB, "inactive")]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_neighbours_are_merged_in_whatever_order_they_are_freed(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    addresses = [allocator.malloc(5 * MiB) for _ in range(3)]
    for at in order:
        allocator.free(addresses[at])
    assert blocks(allocator) == [[(20 * MiB, "inactive")]]
    assert allocator.malloc(19 * MiB) == addresses[0]


def test_segments_are_never_merged() -> None:
    allocator = CachingAllocator()
    for address in [allocator.malloc(20 * MiB), allocator.malloc(20 * MiB)]:
        allocator.free(address)
    allocator.malloc(40 * MiB)
    assert allocator.reserved == 80 * MiB


# ---- oversize blocks


def test_small_requests_leave_oversize_blocks_alone() -> None:
    allocator = with_conf("max_split_size_mb:32")
    allocator.free(allocator.malloc(64 * MiB))
    allocator.malloc(20 * MiB)
    assert allocator.reserved == 84 * MiB


def test_oversize_requests_take_a_whole_block_that_is_not_much_larger() -> None:
    allocator = with_conf("max_split_size_mb:32,max_non_split_rounding_mb:24")
    block = allocator.malloc(64 * MiB)
    allocator.free(block)
    assert allocator.malloc(40 * MiB) != block  # 64 is not less than 40 + 24
    assert allocator.malloc(42 * MiB) == block and allocator.allocated == 104 * MiB


def test_without_a_limit_every_block_is_split() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(GiB))
    allocator.malloc(512 * MiB)
    allocator.malloc(512 * MiB)
    assert allocator.reserved == GiB


# ---- other streams


def test_a_block_used_on_another_stream_waits_for_it() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MiB)
    allocator.used_on(block, SIDE)
    allocator.free(block)
    assert (allocator.allocated, allocator.pending, allocator.requested) == (0, 20 * MiB, 20 * MiB)
    assert allocator.malloc(20 * MiB) != block
    allocator.complete(SIDE)
    assert allocator.pending == 20 * MiB, "noticed at the next malloc, no sooner"
    assert allocator.malloc(20 * MiB) == block and allocator.pending == 0


def test_a_block_waits_for_every_stream_that_used_it() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MiB)
    for stream in (SIDE, OTHER):
        allocator.used_on(block, stream)
    allocator.free(block)
    allocator.complete(SIDE)
    allocator.poll()
    assert allocator.pending == 20 * MiB
    allocator.complete(OTHER)
    allocator.poll()
    assert allocator.pending == 0


def test_uses_on_its_own_stream_do_not_count() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MiB, stream=SIDE)
    allocator.used_on(block, SIDE)
    allocator.free(block)
    assert allocator.malloc(20 * MiB, stream=SIDE) == block


def test_what_is_complete_does_not_cover_what_is_freed_later() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(20 * MiB), allocator.malloc(20 * MiB)
    for block in (first, second):
        allocator.used_on(block, SIDE)
    allocator.free(first)
    allocator.complete(SIDE)
    allocator.free(second)
    allocator.poll()
    assert allocator.pending == 20 * MiB and allocator.malloc(20 * MiB) == first


def test_a_pending_block_is_not_merged() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(5 * MiB), allocator.malloc(5 * MiB)
    allocator.used_on(first, SIDE)
    allocator.free(first)
    allocator.free(second)
    assert blocks(allocator) == [[(5 * MiB, "active_pending_free"), (15 * MiB, "inactive")]]


# ---- running out


def test_what_is_cached_goes_back_before_giving_up() -> None:
    allocator = CachingAllocator(capacity=64 * MiB)
    kept = allocator.malloc(20 * MiB)
    for address in [allocator.malloc(20 * MiB), allocator.malloc(512)]:
        allocator.free(address)
    allocator.malloc(44 * MiB)
    assert actions(allocator)[3:] == [("segment_free", 20 * MiB), ("segment_free", 2 * MiB), ("segment_alloc", 44 * MiB)]
    assert (allocator.retries, allocator.failures) == (1, 0) and layout_of(allocator)[0].address == kept


def test_pending_blocks_are_waited_for_before_giving_up() -> None:
    allocator = CachingAllocator(capacity=32 * MiB)
    block = allocator.malloc(20 * MiB)
    allocator.used_on(block, SIDE)
    allocator.free(block)
    allocator.malloc(32 * MiB)
    assert allocator.pending == 0 and allocator.reserved == 32 * MiB


def test_a_segment_partly_in_use_stays() -> None:
    allocator = CachingAllocator(capacity=32 * MiB)
    kept, gone = allocator.malloc(5 * MiB), allocator.malloc(5 * MiB)
    allocator.free(gone)
    with pytest.raises(Exhausted) as caught:
        allocator.malloc(20 * MiB)
    error = caught.value
    assert (error.size, error.allocated, error.reserved, error.capacity) == (20 * MiB, 5 * MiB, 20 * MiB, 32 * MiB)
    assert (allocator.retries, allocator.failures, allocator.allocated) == (1, 1, 5 * MiB)
    assert allocator.malloc(15 * MiB) == kept + 5 * MiB


def test_the_error_tells_its_numbers_and_survives_a_process_boundary() -> None:
    with pytest.raises(Exhausted) as caught:
        CachingAllocator(capacity=10 * MiB).malloc(11 * MiB)
    text = str(caught.value)
    assert "11.0 MiB more" in text and "10.0 MiB may be reserved" in text and "expandable_segments:True" in text
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.size, again.capacity, str(again)) == (11 * MiB, 10 * MiB, text)


def test_just_enough_oversize_blocks_go_back_first() -> None:
    allocator = with_conf("max_split_size_mb:20", capacity=200 * MiB)
    sizes = (30, 40, 50, 60)
    addresses = [allocator.malloc(size * MiB) for size in sizes]
    small = allocator.malloc(2 * MiB)
    for address in [*addresses, small]:
        allocator.free(address)
    allocator.malloc(100 * MiB)  # no block is that large: the largest go, until there is enough
    assert actions(allocator)[5:] == [
        ("segment_free", 60 * MiB),
        ("segment_free", 50 * MiB),
        ("segment_alloc", 100 * MiB),
    ]
    assert allocator.retries == 0


def test_one_oversize_block_that_is_large_enough_goes_back_alone() -> None:
    allocator = with_conf("max_split_size_mb:20", capacity=200 * MiB)
    for address in [allocator.malloc(size * MiB) for size in (100, 50, 40)]:
        allocator.free(address)
    allocator.malloc(22 * MiB, stream=SIDE)  # another stream's: nothing of its own to give back, all goes
    assert [size for action, size in actions(allocator) if action == "segment_free"] == [40 * MiB, 50 * MiB, 100 * MiB]
    again = with_conf("max_split_size_mb:20", capacity=200 * MiB)
    for address in [again.malloc(size * MiB) for size in (100, 50, 40)]:
        again.free(address)
    again.malloc(19 * MiB)
    assert actions(again)[3:] == [("segment_free", 40 * MiB), ("segment_alloc", 20 * MiB)]


def test_a_memory_fraction_refuses_as_the_driver_does() -> None:
    allocator = with_conf("per_process_memory_fraction:0.5", device_memory=80 * MiB)
    allocator.malloc(20 * MiB)
    allocator.free(allocator.malloc(20 * MiB))
    allocator.malloc(512)
    assert actions(allocator)[2:] == [("segment_free", 20 * MiB), ("segment_alloc", 2 * MiB)]
    with pytest.raises(Exhausted) as caught:
        allocator.malloc(20 * MiB)
    assert caught.value.capacity == 40 * MiB


def test_a_fraction_of_an_unknown_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="memory size is not given"):
        with_conf("per_process_memory_fraction:0.5")


def collecting(*, between: int) -> list[int]:
    """MiB of the segments that go back as garbage, with that many large searches between the first free and the others."""
    text = "per_process_memory_fraction:0.9,garbage_collection_threshold:0.5"
    allocator = with_conf(text, device_memory=1000 * MiB)  # above 450 MiB
    first, second, _, fourth = (allocator.malloc(size * MiB) for size in (50, 60, 70, 80))
    allocator.free(first)
    for _ in range(between):
        allocator.free(allocator.malloc(100 * MiB, stream=SIDE))
    for _ in range(50):
        allocator.malloc(512)  # the small pool's searches age nothing large
    allocator.free(second)
    allocator.free(fourth)
    allocator.malloc(200 * MiB - 100 * MiB * bool(between) + 30 * MiB)  # 490 MiB are reserved, or 492 with the small ones
    assert not [action for action, _ in actions(allocator) if action == "segment_free"]
    allocator.malloc(300 * MiB)
    return [size // MiB for action, size in actions(allocator) if action == "segment_free"]


def test_garbage_goes_back_from_the_mean_age_on() -> None:
    assert collecting(between=10) == [50], "ages 12, 2, 2 and 2: one is above their mean, and it is enough"
    assert collecting(between=0) == [50, 60, 80], "all have the mean age, and a round is never stopped half-way"


def test_without_a_threshold_nothing_goes_back_by_itself() -> None:
    allocator = with_conf("per_process_memory_fraction:0.9", device_memory=1000 * MiB)
    for _ in range(4):
        allocator.free(allocator.malloc(100 * MiB, stream=_))
    assert allocator.reserved == 400 * MiB


def test_emptying_the_cache_leaves_segments_in_use() -> None:
    allocator = CachingAllocator()
    kept = allocator.malloc(3 * MiB)
    for address in [allocator.malloc(100 * MiB), allocator.malloc(3 * MiB), allocator.malloc(512)]:
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MiB and allocator.peak_reserved == 122 * MiB
    assert allocator.malloc(1 * MiB + 1) == kept + 3 * MiB
    allocator.reset_peaks()
    assert allocator.peak_reserved == 20 * MiB


def test_capacity_is_counted_in_units_of_two_mib() -> None:
    driver = Driver(64 * MiB)
    allocator = CachingAllocator(conf("large_segment_size_mb:21"), driver=driver)
    allocator.malloc(2 * MiB)
    assert (allocator.reserved, driver.held, driver.free) == (21 * MiB, 22 * MiB, 42 * MiB)


def test_no_bytes_need_no_memory_and_an_unknown_address_is_refused() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    address = allocator.malloc(1)
    allocator.free(address)
    with pytest.raises(UsageError, match="none of the 0 blocks"):
        allocator.free(address)
    with pytest.raises(UsageError, match="none of the 0 blocks"):
        allocator.used_on(address, SIDE)


# ---- expandable segments


def test_expandable_segments_grow_page_by_page() -> None:
    allocator = with_conf("expandable_segments:True")
    first = allocator.malloc(100 * MiB)
    second = allocator.malloc(30 * MiB)
    assert actions(allocator) == [("segment_map", 100 * MiB), ("segment_map", 40 * MiB)]
    assert second == first + 100 * MiB
    assert blocks(allocator) == [[(100 * MiB, "active_allocated"), (30 * MiB, "active_allocated"), (10 * MiB, "inactive")]]


def test_pages_are_two_mib_in_the_small_pool_and_a_large_segment_elsewhere() -> None:
    allocator = with_conf("expandable_segments:True,large_segment_size_mb:64")
    allocator.malloc(512)
    allocator.malloc(MiB + 1)
    assert actions(allocator) == [("segment_map", 2 * MiB), ("segment_map", 64 * MiB)]


def test_expandable_blocks_are_split_down_to_512_bytes() -> None:
    allocator = with_conf("expandable_segments:True")
    allocator.malloc(20 * MiB - 512)
    assert allocator.allocated == 20 * MiB - 512 and waste(allocator) == 512


def test_free_room_at_the_end_is_grown_and_not_left() -> None:
    allocator = with_conf("expandable_segments:True")
    first = allocator.malloc(15 * MiB)
    second = allocator.malloc(22 * MiB)  # 5 MiB are free, one page more is needed
    assert second == first + 15 * MiB and allocator.reserved == 40 * MiB


def test_unmapping_gives_back_whole_pages_inside_free_blocks() -> None:
    allocator = with_conf("expandable_segments:True")
    first = allocator.malloc(10 * MiB)
    middle = allocator.malloc(75 * MiB)
    last = allocator.malloc(5 * MiB)
    allocator.free(middle)  # 10 to 85 of 100 MiB
    allocator.empty_cache()
    assert actions(allocator)[-1] == ("segment_unmap", 60 * MiB) and allocator.reserved == 40 * MiB
    assert [(s.address - first, s.size) for s in layout_of(allocator)] == [(0, 20 * MiB), (80 * MiB, 20 * MiB)]
    assert allocator.malloc(8 * MiB) == first + 10 * MiB, "the best fit: 5 and 10 MiB at the edges and 10 at the end"
    assert last == first + 85 * MiB


def test_the_lowest_hole_is_filled_first() -> None:
    allocator = with_conf("expandable_segments:True")
    first = allocator.malloc(20 * MiB)
    hole = allocator.malloc(40 * MiB)
    allocator.malloc(20 * MiB)
    allocator.free(hole)
    allocator.empty_cache()
    assert allocator.malloc(60 * MiB) == first + 80 * MiB, "the hole has 40 MiB"
    assert allocator.malloc(35 * MiB) == hole and allocator.reserved == 140 * MiB


def test_a_block_that_can_grow_less_is_preferred() -> None:
    allocator = with_conf("expandable_segments:True")
    first = allocator.malloc(30 * MiB)
    allocator.malloc(25 * MiB)
    allocator.free(first)
    # Free: 30 MiB at the front, that cannot grow, and 5 MiB at the end, that can grow for ever.
    assert allocator.malloc(4 * MiB) == first


def test_an_expandable_segment_that_is_all_free_is_gone() -> None:
    allocator = with_conf("expandable_segments:True")
    allocator.free(allocator.malloc(100 * MiB))
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator.heads
    allocator.malloc(100 * MiB)
    assert allocator.reserved == 100 * MiB


def test_address_space_is_nine_eighths_of_the_memory_in_whole_pages() -> None:
    assert Driver(100 * MiB).span(20 * MiB) == 120 * MiB
    allocator = with_conf("expandable_segments:True", capacity=100 * MiB)
    first = allocator.malloc(80 * MiB)
    with pytest.raises(Exhausted):
        allocator.malloc(40 * MiB)
    allocator.free(first)
    assert allocator.malloc(100 * MiB) == first


def test_pages_go_from_one_stream_to_another_under_pressure() -> None:
    allocator = with_conf("expandable_segments:True", capacity=100 * MiB)
    first, second = allocator.malloc(40 * MiB), allocator.malloc(50 * MiB)
    allocator.free(second)
    allocator.malloc(60 * MiB, stream=SIDE)
    assert actions(allocator)[2:] == [("segment_unmap", 60 * MiB), ("segment_map", 60 * MiB)]
    assert allocator.retries == 1
    allocator.free(first)


def test_the_fraction_test_of_expandable_segments_uses_the_size_of_a_whole_segment() -> None:
    allocator = with_conf("expandable_segments:True,per_process_memory_fraction:0.5", device_memory=78 * MiB)
    allocator.malloc(15 * MiB)
    with pytest.raises(Exhausted):
        allocator.malloc(8 * MiB)  # one page of 20 would make 40, and 20 + 20 are more than 39


def test_switched_off_expandable_blocks_are_left_alone() -> None:
    allocator = with_conf("expandable_segments:True")
    allocator.free(allocator.malloc(20 * MiB))
    allocator.set_settings(AllocatorSettings())
    allocator.malloc(20 * MiB)
    assert actions(allocator) == [("segment_map", 20 * MiB), ("segment_alloc", 20 * MiB)]


# ---- private pools


def test_a_private_pool_has_memory_of_its_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MiB))
    allocator.begin_pool(POOL)
    inside = allocator.malloc(20 * MiB)
    allocator.end_pool(POOL)
    assert allocator.reserved == 40 * MiB and allocator.events[-1].pool_id == POOL
    allocator.free(inside)
    assert allocator.malloc(20 * MiB) != inside


def test_a_private_pools_memory_goes_back_once_nobody_uses_it() -> None:
    allocator = CachingAllocator()
    allocator.begin_pool(POOL)
    allocator.free(allocator.malloc(20 * MiB))
    allocator.end_pool(POOL)
    allocator.empty_cache()
    allocator.empty_cache(POOL)
    assert allocator.reserved == 20 * MiB
    allocator.release_pool(POOL)
    allocator.empty_cache(POOL)
    assert allocator.reserved == 0 and not list(allocator.private)


def test_only_chosen_streams_may_go_to_a_private_pool_and_the_last_begun_wins() -> None:
    allocator = CachingAllocator()
    allocator.begin_pool(POOL, streams={SIDE})
    allocator.malloc(20 * MiB)
    allocator.malloc(20 * MiB, stream=SIDE)
    allocator.begin_pool((0, 5))
    allocator.malloc(20 * MiB, stream=SIDE)
    assert [event.pool_id for event in allocator.events] == [(0, 0), POOL, (0, 5)]
    with pytest.raises(UsageError, match="they go there already"):
        allocator.begin_pool(POOL)
    with pytest.raises(UsageError, match="private pool"):
        allocator.release_pool((3, 3))


def test_a_pool_without_splitting_hands_out_whole_segments() -> None:
    allocator = CachingAllocator()
    allocator.create_pool(POOL, no_split=True)
    allocator.begin_pool(POOL)
    allocator.malloc(2 * MiB)
    allocator.malloc(512)
    assert blocks(allocator) == [[(20 * MiB, "active_allocated")], [(2 * MiB, "active_allocated")]]


def test_while_a_graph_is_captured_nothing_goes_back_and_nothing_is_waited_for() -> None:
    allocator = CachingAllocator(capacity=60 * MiB)
    cached = allocator.malloc(20 * MiB)
    allocator.free(cached)
    allocator.begin_pool(POOL)
    inside = allocator.malloc(20 * MiB)
    allocator.used_on(inside, SIDE)
    allocator.free(inside)
    allocator.complete(SIDE)
    with pytest.raises(Exhausted):
        allocator.malloc(40 * MiB)
    assert allocator.retries == 0 and allocator.pending == 20 * MiB and allocator.reserved == 40 * MiB
    allocator.end_pool(POOL)
    allocator.poll()  # a use recorded in the capture is done with it
    assert allocator.pending == 0


def test_a_use_from_before_a_capture_still_needs_its_event() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MiB)
    allocator.used_on(block, SIDE)
    allocator.begin_pool(POOL)
    allocator.free(block)
    allocator.end_pool(POOL)
    allocator.poll()
    assert allocator.pending == 20 * MiB
    allocator.complete(SIDE)
    allocator.poll()
    assert allocator.pending == 0


# ---- settings


def test_the_defaults_are_torchs() -> None:
    settings = AllocatorSettings.from_environment({})
    assert settings == AllocatorSettings() == conf("")
    assert (settings.max_split_size, settings.max_non_split_rounding, settings.large_segment_size) == (
        UNLIMITED,
        20 * MiB,
        20 * MiB,
    )


def test_every_setting_is_read() -> None:
    settings = conf(
        " max_split_size_mb: 128, max_non_split_rounding_mb:32,garbage_collection_threshold:0.8,expandable_segments:True,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:24,per_process_memory_fraction:0.25,"
        "pinned_use_background_threads:True,nonsense:[1,2],"
    )
    assert (settings.max_split_size, settings.max_non_split_rounding) == (128 * MiB, 32 * MiB)
    assert (settings.large_segment_size, settings.garbage_collection_threshold) == (24 * MiB, 0.8)
    assert settings.expandable_segments and settings.per_process_memory_fraction == 0.25
    assert settings.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert settings.ignored == ("pinned_use_background_threads", "nonsense")


def test_the_general_variable_goes_first_and_the_cuda_one_says_the_fraction() -> None:
    environ = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.5",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,per_process_memory_fraction:0.25",
    }
    settings = AllocatorSettings.from_environment(environ)
    assert settings.expandable_segments and settings.splits_everything and settings.per_process_memory_fraction == 0.25
    only = AllocatorSettings.from_environment({"PYTORCH_CUDA_ALLOC_CONF": environ["PYTORCH_CUDA_ALLOC_CONF"]})
    assert only.max_split_size == 64 * MiB


ACCEPTED = [
    "max_split_size_mb:20",
    "max_split_size_mb:25abc",
    "max_split_size_mb:+30",
    "max_split_size_mb:30.9",
    "max_split_size_mb:-5",
    "max_split_size_mb:18446744073709551615",
    "large_segment_size_mb:11, max_split_size_mb : 11\t",
    "large_segment_size_mb:40",
    "max_split_size_mb:30,large_segment_size_mb:24",
    "large_segment_size_mb:24,large_segment_size_mb:22",
    "large_segment_size_mb:24,max_non_split_rounding_mb:30",
    "max_non_split_rounding_mb:30,large_segment_size_mb:24",
    "max_non_split_rounding_mb:50",
    "garbage_collection_threshold:0.5x",
    "garbage_collection_threshold:1e-3",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,>:8]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[1:2,4:8,2:4]",
    "roundup_power2_divisions:[131072:2,>:4]",
    "roundup_power2_divisions:[64:2,64:4,]",
    "roundup_power2_divisions:[]",
    "expandable_segments:True,nonsense:1,max_split_size_mb:21",
    "expandable_segments:False,",
]
REFUSED = [
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb:0x30",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_split_size_mb 20",
    "max_split_size_mb:99999999999999999999999",
    "large_segment_size_mb:10",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:half",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[3:4]",
    "roundup_power2_divisions:[0:4]",
    "roundup_power2_divisions:[256:1,512:2",
    "expandable_segments:true",
    "expandable_segments:True max_split_size_mb:20",
    ",",
]


@pytest.mark.parametrize("text", [*REFUSED, "per_process_memory_fraction:1.5", "backend:other", "a:b:c", ":", "x:[1"])
def test_what_does_not_parse_is_refused_in_three_parts(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": text})
    assert repr(text) in caught.value.asked and caught.value.found and caught.value.next_move


def test_another_backend_is_read_and_not_simulated() -> None:
    settings = conf("backend:cudaMallocAsync")
    with pytest.raises(UsageError, match="not public"):
        CachingAllocator(settings)


TORCHS_OWN = """
import ctypes, json, sys, torch
library = ctypes.CDLL(sys.argv[1])
instance = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig8instanceEv
instance.restype = ctypes.c_void_p
at, answers = instance(), []
for text in json.loads(sys.argv[2]):
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except Exception:
        answers.append(None)
        continue
    large, split, rounding, divisions = (ctypes.c_uint64 * 4).from_address(at)
    answers.append([large, split, rounding, list((ctypes.c_uint64 * 16).from_address(divisions)),
                    ctypes.c_double.from_address(at + 48).value, ctypes.c_bool.from_address(at + 56).value])
print(json.dumps(answers))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the settings out of torch's library")
def test_torch_reads_the_same_out_of_the_same_text() -> None:
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    if not torch.__version__.startswith("2.13.") or not library.exists() or ctypes.sizeof(ctypes.c_void_p) != 8:
        pytest.skip("where torch keeps them is known for 2.13 on Linux")
    texts = [*ACCEPTED, *(text for text in REFUSED if text)]
    command = [sys.executable, "-c", TORCHS_OWN, str(library), json.dumps(texts)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    for text, torchs in zip(texts, json.loads(child.stdout)):
        if text in REFUSED:
            assert torchs is None, text
            continue
        mine = conf(text)
        assert torchs == [
            mine.large_segment_size,
            mine.max_split_size,
            mine.max_non_split_rounding,
            list(mine.roundup_power2_divisions),
            mine.garbage_collection_threshold,
            mine.expandable_segments,
        ], text
    assert INTERVALS == 16


def test_the_room_needs_neither_torch_nor_the_rest_of_memfit() -> None:
    root = Path(memfit.__file__).parent / "allocators"
    import ast

    for path in root.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                allowed = ("memfit.allocators", "memfit._units", "memfit._errors")
                assert name.startswith(allowed) if name.startswith("memfit") else name.split(".")[0] in sys.stdlib_module_names
