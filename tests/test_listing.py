"""Tests of many items name those that fail."""

from __future__ import annotations

import pytest
from listing import each


def test_all_that_fail_are_named() -> None:
    def check(number: int) -> None:
        assert number % 2 == 0, f"{number} is odd"

    each([2, 4])(check)()
    with pytest.raises(AssertionError, match=r"(?s)^item 1: 1 is odd.*\nitem 3: 3 is odd"):
        each([1, 2, 3], name=lambda number: f"item {number}")(check)()


def test_what_a_check_raises_beside_assertions_is_not_hidden() -> None:
    def check(number: int) -> None:
        raise KeyError(number)

    with pytest.raises(KeyError):
        each([1])(check)()


def test_a_test_of_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing"):
        each([])
