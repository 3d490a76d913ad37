"""The part of a product that the quick tests run: nothing is missing in it, and it is small."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import covering, marked, once

ROWS = [row for row in product("abcdef", range(4), (True, False)) if row[:2] != ("a", 0)]


def pairs(rows: list[tuple[object, ...]]) -> set[object]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_two_values_that_meet_in_the_product_meet_in_the_part() -> None:
    found = covering(ROWS)
    assert pairs(found) == pairs(ROWS) and set(found) <= set(ROWS)


def test_it_is_little_more_than_the_two_longest_lists_need() -> None:
    assert len(covering(ROWS)) <= 1.15 * (6 * 4 - 1)
    assert covering(ROWS) == covering(ROWS)


def test_one_choice_alone_is_all_there_is() -> None:
    assert covering([("only",)]) == []  # no pair is missing
    assert len(covering([("a", 1)])) == 1


def test_the_others_are_slow_and_nothing_is_lost() -> None:
    rows = list(product("abc", "xyz", (1, 2)))
    found = marked([pytest.param(*row, id=str(row)) for row in rows], rows)
    assert [each.values for each in found] == rows and [each.id for each in found] == [str(row) for row in rows]
    quick = [each.values for each in found if not each.marks]
    assert quick == covering(rows) and len(quick) < len(rows)


def test_once_has_each_value_and_spreads_them() -> None:
    rows = list(product("abcdefgh", ("x", "y")))
    quick = [each.values for each in once(rows) if not each.marks]
    assert [first for first, _ in quick] == list("abcdefgh")
    assert sorted(second for _, second in quick) == ["x"] * 4 + ["y"] * 4
