"""How many samples go into each micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memfit.batches.pieces import bounds, count_of, equal_size_runs, equal_sizes, next_size, pieces_by_size, size_runs, sizes

COUNTS = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("samples", "largest", "pieces"),
    [
        (10, 4, (4, 3, 3)),
        (10, 5, (5, 5)),
        (10, 9, (5, 5)),
        (10, 10, (10,)),
        (10, 11, (10,)),
        (1, 8, (1,)),
        (7, 1, (1,) * 7),
        (5, 0, (1,) * 5),
        (0, 4, ()),
    ],
)
def test_as_few_as_possible_and_as_equal_as_possible(samples: int, largest: int, pieces: tuple[int, ...]) -> None:
    assert sizes(samples, largest) == pieces


@pytest.mark.parametrize(
    ("samples", "largest", "pieces"),
    [(10, 4, (4, 4, 2)), (10, 5, (5, 5)), (10, 99, (10,)), (3, 1, (1, 1, 1)), (5, 0, (1,) * 5), (0, 4, ())],
)
def test_full_ones_and_a_remainder_for_compiled_models(samples: int, largest: int, pieces: tuple[int, ...]) -> None:
    assert equal_sizes(samples, largest) == pieces


@given(COUNTS, COUNTS)
def test_every_sample_is_in_exactly_one_piece(samples: int, largest: int) -> None:
    for pieces in (sizes(samples, largest), equal_sizes(samples, largest)):
        assert sum(pieces) == samples
        assert 0 < min(pieces) <= max(pieces) <= largest
        # One piece fewer would be too few for the largest allowed.
        assert len(pieces) == -(-samples // largest)
        assert len(set(pieces)) <= 2


@given(COUNTS, COUNTS)
def test_balanced_pieces_differ_by_one_at_most_the_larger_first(samples: int, largest: int) -> None:
    pieces = sizes(samples, largest)
    assert pieces[0] - pieces[-1] <= 1 and tuple(sorted(pieces, reverse=True)) == pieces
    # No cut into pieces of at most `largest` has a smaller largest piece with as few of them.
    assert pieces[0] == -(-samples // len(pieces))


@given(st.lists(st.integers(1, 50), max_size=20))
def test_bounds_lie_end_to_end(pieces: list[int]) -> None:
    found = list(bounds(pieces))
    assert [stop - start for start, stop in found] == pieces
    assert [start for start, _ in found] == [0, *(stop for _, stop in found)][: len(pieces)]


@given(st.integers(2, 5000), COUNTS)
def test_no_sample_is_left_by_itself_where_two_are_needed(samples: int, largest: int) -> None:
    for cut in (sizes, equal_sizes):
        pieces = cut(samples, largest, 2)
        assert sum(pieces) == samples and min(pieces) >= 2
        assert max(pieces) <= max(largest, 3 if samples % 2 else 2)


@given(st.integers(2, 500), st.integers(1, 9))
def test_one_size_after_another_leaves_no_sample_by_itself(samples: int, wanted: int) -> None:
    found, left = [], samples
    while left:
        found.append(next_size(left, wanted, 2))
        left -= found[-1]
    assert min(found) >= 2 and max(found) <= max(wanted, 3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 2))
def test_pieces_by_size_take_what_their_largest_sample_leaves_room_for(elements: list[int], room: int, least: int) -> None:
    elements.sort(reverse=True)
    pieces = pieces_by_size(elements, lambda size: room // size, least)
    assert sum(pieces) == len(elements)
    for start, stop in bounds(pieces):
        allowed = max(least, room // elements[start])
        assert min(least, len(elements)) <= stop - start <= allowed + (least - 1)
        if stop < len(elements) and least == 1:
            assert stop - start == allowed


@given(COUNTS, COUNTS, st.integers(1, 4))
def test_counted_they_are_the_same_pieces(samples: int, largest: int, least: int) -> None:
    for cut, counted in ((sizes, size_runs), (equal_sizes, equal_size_runs)):
        pieces, runs = cut(samples, largest, least), counted(samples, largest, least)
        assert [size for size, count in runs for _ in range(count)] == list(pieces)
        assert count_of(runs) == len(pieces) and len(runs) <= 2


def test_as_many_as_nobody_could_list_are_counted() -> None:
    assert count_of(size_runs(10**15, 7)) == -(-(10**15) // 7)
    assert equal_size_runs(10**15, 10**3) == ((1000, 10**12),)
