"""From tensors to a device's memory: the CUDA caching allocator rule by rule, and what glibc keeps.

The rules and line numbers: c10/cuda/CUDACachingAllocator.cpp of torch 2.6.
"""

from __future__ import annotations

import pytest
from handmade import Course, two_blocks
from hypothesis import given, strategies as st

from memfit._units import KiB, MiB
from memfit.allocators.events import Exhausted
from memfit.profiling.allocator import (
    HEAP_TENSOR,
    HEAP_WASTE,
    Peak,
    caching_peak,
    heap_peak,
    peak_on,
    thresholds_pinned,
    workspace_bytes,
)


def reserved(*steps: tuple[str, int] | str) -> int:
    """Bytes of segments after births ("name", bytes) and deaths "name"."""
    course = Course()
    for step in steps:
        if isinstance(step, str):
            course.death(step)
        else:
            course.birth(*step)
    return caching_peak(course.done(), 1, workspaces=0).reserved


def many(count: int, size: int) -> list[tuple[str, int]]:
    return [(f"t{i}", size) for i in range(count)]


# ---- sizes and segments (round_size, get_allocation_size)


def test_nothing_takes_nothing() -> None:
    assert reserved() == reserved(("a", 0)) == 0


@pytest.mark.parametrize("size", [1, 511, 512])
def test_sizes_are_rounded_up_to_512(size: int) -> None:
    # A small segment of 2 MiB holds 4,096 blocks of 512 bytes, however little of a block is asked for.
    assert reserved(*many(4096, size)) == 2 * MiB
    assert reserved(*many(4097, size)) == 4 * MiB


def test_one_byte_more_takes_another_512() -> None:
    assert reserved(*many(2048, 513)) == 2 * MiB
    assert reserved(*many(2049, 513)) == 4 * MiB


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1 * MiB, 2 * MiB),
        (1 * MiB + 1, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB - 511, 10 * MiB),  # the rounded size decides
        (10 * MiB, 10 * MiB),
        (10 * MiB + 1, 12 * MiB),
        (33 * MiB, 34 * MiB),
        (34 * MiB, 34 * MiB),
    ],
)
def test_a_segment_by_the_size_asked_for(size: int, segment: int) -> None:
    assert reserved(("a", size)) == segment


# ---- pools (get_pool)


def test_the_small_pool_serves_up_to_one_mebibyte_and_the_large_pool_the_rest() -> None:
    assert reserved(("a", 20 * MiB), "a", ("b", 1 * MiB)) == 22 * MiB
    assert reserved(("a", 1 * MiB), "a", ("b", 1 * MiB + 1)) == 22 * MiB
    assert reserved(("a", 20 * MiB), "a", ("b", 1 * MiB + 1)) == 20 * MiB


def test_the_pool_is_chosen_by_the_rounded_size() -> None:
    # One byte below the limit rounds up to it and still is small.
    assert reserved(("a", MiB - 1), ("b", MiB - 1)) == 2 * MiB


# ---- best fit (get_free_block)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    # Free: 30 and 20 MiB, in different segments. Were 18 put into the 30, then 28 would not fit any more.
    free = [("a", 30 * MiB), ("b", 20 * MiB), "a", "b"]
    assert reserved(*free, ("c", 18 * MiB), ("d", 28 * MiB)) == 50 * MiB


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_lowest_address_wins_among_equals(order: str) -> None:
    # Two segments of 9 + 11 MiB, the elevens free. The next 11 goes into the first, whatever was freed last, so that with
    # its nine the second segment is free as a whole.
    steps = [("a9", 9 * MiB), ("a11", 11 * MiB), ("b9", 9 * MiB), ("b11", 11 * MiB)]
    steps += [*(f"{name}11" for name in order), ("c", 11 * MiB)]
    assert reserved(*steps, "b9", ("d", 20 * MiB)) == 40 * MiB
    assert reserved(*steps, "a9", ("d", 20 * MiB)) == 60 * MiB


def test_a_block_too_small_is_not_taken() -> None:
    assert reserved(("a", 12 * MiB), "a", ("b", 13 * MiB)) == 12 * MiB + 14 * MiB


# ---- splitting (should_split)


def test_small_blocks_split_down_to_512_bytes() -> None:
    assert reserved(*many(4, 512 * KiB)) == 2 * MiB
    # 1 MiB - 512 leaves 1 MiB + 512 of a small segment, which holds 1 MiB and then 512 bytes.
    assert reserved(("a", MiB - 512), ("b", MiB), ("c", 512)) == 2 * MiB
    assert reserved(("a", MiB - 512), ("b", MiB), ("c", 513)) == 4 * MiB


def test_large_blocks_split_only_if_more_than_one_mebibyte_is_left() -> None:
    # 20 MiB - 18 MiB leaves 2 MiB for a second tensor; 20 - 19 leaves 1 MiB, which is wasted with the first.
    waiting = ("x", 20 * MiB), "x"
    assert reserved(*waiting, ("a", 18 * MiB), ("b", 2 * MiB)) == 20 * MiB
    assert reserved(*waiting, ("a", 19 * MiB - 512), ("b", 1 * MiB + 512)) == 20 * MiB
    assert reserved(*waiting, ("a", 19 * MiB), ("b", 1 * MiB + 512)) == 40 * MiB


def test_what_was_handed_out_unsplit_comes_back_whole() -> None:
    assert reserved(("x", 20 * MiB), "x", ("a", 19 * MiB), "a", ("b", 20 * MiB)) == 20 * MiB


def test_the_front_is_handed_out_and_the_tail_stays_free() -> None:
    # a | b | rest: freeing a leaves 2 MiB before b, which do not join the 14 behind it.
    steps = [("a", 2 * MiB), ("b", 4 * MiB), "a"]
    assert reserved(*steps, ("c", 14 * MiB)) == 20 * MiB
    assert reserved(*steps, ("c", 16 * MiB)) == 36 * MiB


# ---- merging (try_merge)

THREE = [("a", 6 * MiB), ("b", 6 * MiB), ("c", 8 * MiB)]
"""Side by side in one segment of 20 MiB."""


@pytest.mark.parametrize(
    ("freed", "together"),
    [("ab", 12 * MiB), ("ba", 12 * MiB), ("bc", 14 * MiB), ("cb", 14 * MiB), ("acb", 20 * MiB), ("abc", 20 * MiB)],
)
def test_neighbours_merge_on_both_sides(freed: str, together: int) -> None:
    assert reserved(*THREE, *freed, ("d", together)) == 20 * MiB
    assert reserved(*THREE, *freed, ("d", together + 1)) > 20 * MiB


def test_what_lies_between_keeps_them_apart() -> None:
    assert reserved(*THREE, "a", "c", ("d", 14 * MiB)) == 34 * MiB


def test_segments_never_merge() -> None:
    assert reserved(("a", 20 * MiB), ("b", 20 * MiB), "a", "b", ("c", 40 * MiB)) == 80 * MiB
    assert reserved(("a", 2 * MiB - 512), ("b", 2 * MiB), "a", "b", ("c", 21 * MiB)) == 42 * MiB


def test_segments_are_never_returned() -> None:
    assert reserved(("a", 100 * MiB), "a") == 100 * MiB
    assert reserved(("a", 100 * MiB), "a", ("b", 102 * MiB), "b", ("c", 100 * MiB)) == 202 * MiB


def test_fragments_make_a_larger_peak_than_tensors() -> None:
    steps = [*many(10, 10 * MiB), *(f"t{i}" for i in range(10)), ("whole", 100 * MiB)]
    assert reserved(*steps) == 200 * MiB


@given(st.lists(st.tuples(st.integers(1, 40 * MiB), st.integers(0, 5)), max_size=30))
def test_reserved_is_never_below_what_is_alive(births: list[tuple[int, int]]) -> None:
    course = Course()
    for i, (size, dies_after) in enumerate(births):
        course.birth(f"t{i}", size)
        if dies_after < i and (name := f"t{i - dies_after - 1}") in _alive(course):
            course.death(name)
    timeline = course.done()
    held = caching_peak(timeline, 1, workspaces=0).reserved
    assert held >= timeline.peak(1)
    assert held % (2 * MiB) == 0
    # Segments for each alone would be the worst: what is free is used again.
    assert held <= sum(max(20 * MiB, size + 2 * MiB) for size, _ in births)


def _alive(course: Course) -> set[str]:
    alive: set[str] = set()
    for index, born in course._events:
        (alive.add if born else alive.discard)(course._names[index])
    return alive


# ---- the step's peak


def test_a_single_micro_batch_skips_the_second_one() -> None:
    timeline = two_blocks()
    samples = MiB  # of 1 byte each: inputs of 1 MiB, saved tensors of 10
    both, first = (caching_peak(timeline, samples, accumulates=a) for a in (True, False))
    assert first == caching_peak(two_blocks(windows=1), samples)
    assert both.reserved >= first.reserved


@pytest.mark.parametrize(
    ("capability", "workspace"), [(None, 8_519_680), ((8, 0), 8_519_680), ((9, 0), 32 * MiB), ((10, 0), 32 * MiB)]
)
def test_cublas_keeps_a_workspace_per_thread(capability: tuple[int, int] | None, workspace: int) -> None:
    timeline = Course().birth("a", 30 * MiB).done()
    peak = peak_on("cuda", timeline, 1, environ={}, capability=capability)
    own = 64 * MiB if workspace == 32 * MiB else 20 * MiB  # two of 8.125 MiB lie in one large segment
    assert workspace_bytes(capability) == workspace
    assert (peak.allocated, peak.reserved) == (30 * MiB + 2 * workspace, 30 * MiB + own)
    assert 2 * 4096 * KiB + 8 * 16 * KiB == 8_519_680


def test_the_smallest_budget_is_below_what_is_reserved_in_plenty() -> None:
    course = Course().birth("weights", 30 * MiB).phase("forward")
    for i in range(10):
        course.birth(f"t{i}", 20 * MiB)
    course.death(*(f"t{i}" for i in range(10)))
    timeline = course.birth("whole", 150 * MiB).done()  # no segment of 20 is large enough: they go back under pressure
    peak = peak_on("cuda", timeline, 1, environ={})
    assert peak.reserved == (30 + 20 + 200 + 150) * MiB
    assert peak.smallest_budget == (30 + 20 + 200) * MiB
    assert peak.allocated <= peak.smallest_budget <= peak.upper
    with pytest.raises(Exhausted):
        caching_peak(timeline, 1, capacity=peak.smallest_budget - 2 * MiB)
    assert caching_peak(timeline, 1, capacity=peak.smallest_budget).reserved <= peak.smallest_budget


def test_settings_in_the_environment_are_followed() -> None:
    timeline = Course().birth("a", 30 * MiB).phase("forward").birth("b", 21 * MiB + 1).done()
    peaks = [
        peak_on("cuda", timeline, 1, environ={"PYTORCH_CUDA_ALLOC_CONF": text})
        for text in ("", "expandable_segments:True", "backend:cudaMallocAsync")
    ]
    assert [peak.reserved for peak in peaks] == [72 * MiB, 80 * MiB, None]


@pytest.mark.parametrize("conf", ["per_process_memory_fraction:0.5", "garbage_collection_threshold:0.8"])
def test_what_depends_on_the_devices_size_is_the_budgets_business(conf: str) -> None:
    """A share of the device that is set in the environment bounds the budget (`hardware/device.py`), and is no error here."""
    timeline = Course().birth("a", 30 * MiB).phase("forward").birth("b", 21 * MiB).done()
    plain, bounded = (peak_on("cuda", timeline, 1, environ={"PYTORCH_CUDA_ALLOC_CONF": text}) for text in ("", conf))
    assert plain == bounded and bounded.smallest_budget == plain.smallest_budget


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "mps", "unheard of"])
def test_the_upper_bound_is_never_below_what_is_expected(kind: str) -> None:
    for samples in (1, 10, 10**6):
        peak = peak_on(kind, two_blocks(), samples)
        assert two_blocks().peak(samples) <= peak.allocated <= peak.expected <= peak.upper
        assert peak.lower <= peak.expected and peak.smallest_budget <= peak.expected


# ---- glibc

PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@pytest.mark.parametrize(
    ("environ", "pinned"),
    [
        (PINNED, True),
        ({name: str(MiB) for name in PINNED}, True),
        ({}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "65536"}, False),
        ({**PINNED, "MALLOC_TRIM_THRESHOLD_": str(MiB + 1)}, False),
        ({**PINNED, "MALLOC_MMAP_THRESHOLD_": "-1"}, False),
        ({**PINNED, "MALLOC_MMAP_THRESHOLD_": "64k"}, False),
        ({**PINNED, "MALLOC_MMAP_THRESHOLD_": ""}, False),
    ],
)
def test_freed_memory_goes_back_only_if_both_thresholds_are_small(environ: dict[str, str], pinned: bool) -> None:
    assert thresholds_pinned(environ) is pinned
    timeline = Course().phase("forward").birth("a", MiB).death("a").done()
    assert peak_on("cpu", timeline, 1, environ=environ) == Peak(
        MiB, MiB, MiB if pinned else MiB + int(HEAP_WASTE * MiB), MiB
    )


def test_the_heap_keeps_small_tensors_that_come_and_go() -> None:
    course = Course().birth("weights", 5 * MiB).phase("forward")
    course.birth("small", MiB).birth("large", HEAP_TENSOR).birth("nearly", HEAP_TENSOR - 1)
    timeline = course.death("large", "small").birth("later", 2 * MiB).death("nearly", "later").done()
    # What was there before the step lies where it lies; what is large never lies in the heap.
    assert heap_peak(timeline, 1) == HEAP_TENSOR - 1 + 2 * MiB


def test_the_heap_counts_what_was_there_before_and_goes() -> None:
    course = Course().birth("gradients", 3 * MiB).phase("forward").death("gradients").birth("a", MiB).death("a")
    assert heap_peak(course.done(), 1) == 3 * MiB


def test_a_tensor_leaves_the_heap_when_its_samples_make_it_large() -> None:
    timeline = Course().phase("forward").birth("a", 0, MiB).death("a").done()
    assert [heap_peak(timeline, n) for n in (1, 31, 32)] == [MiB, 31 * MiB, 0]
    uppers = [peak_on("cpu", timeline, n, environ={}).upper for n in (1, 31, 32)]
    assert uppers == [MiB + int(HEAP_WASTE * MiB), 31 * MiB + int(HEAP_WASTE * 31 * MiB), 32 * MiB]
