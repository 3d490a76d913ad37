"""A part of a product of choices in which any two choices still meet: what `make test` runs of it; the rest is slow."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row", bound=Sequence[Hashable])


def covering(rows: Sequence[Row]) -> list[Row]:
    """Some of `rows`, in their order, such that every two values that share one of `rows` share one of these; the same ones
    each time. Greedy: always the first row of those that add most."""
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [rows[i] for i in sorted(chosen)]


def marked(parameters: Sequence[Any], rows: Sequence[Sequence[Hashable]]) -> list[Any]:
    """`parameters` (of pytest.param) with all but a covering part marked slow; `rows` say what each is made of."""
    quick = set(map(tuple, covering([tuple(row) for row in rows])))
    return [
        each if tuple(row) in quick else pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.slow])
        for each, row in zip(parameters, rows, strict=True)
    ]
