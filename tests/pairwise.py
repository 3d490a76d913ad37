"""A part of a product of choices in which any two still meet, or each is there: what `make test` runs; the rest is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row", bound=Sequence[Hashable])


def covering(rows: Sequence[Row], together: int = 2) -> list[Row]:
    """Some of `rows`, in their order, such that any `together` values that share one of `rows` share one of these; the same
    ones each time. Greedy: always a row of those that add most, with values that were taken least, and the first of these."""
    sets = [set(combinations(enumerate(row), together)) for row in rows]

    def worth(i: int) -> tuple[int, int, int]:
        return len(sets[i] & missing), -sum(taken[each] for each in enumerate(rows[i])), -i

    missing = set().union(*sets)
    taken: Counter[tuple[int, Hashable]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=worth)
        chosen.add(best)
        taken.update(enumerate(rows[best]))
        missing -= sets[best]
    return [rows[i] for i in sorted(chosen)]


def marked(parameters: Sequence[Any], rows: Iterable[Sequence[Hashable]], together: int = 2) -> list[Any]:
    """`parameters` (of pytest.param) with all but a covering part marked slow; `rows` say what each is made of."""
    rows = [tuple(row) for row in rows]
    quick = set(covering(rows, together))
    return [
        each if row in quick else pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.slow])
        for each, row in zip(parameters, rows, strict=True)
    ]


def once(rows: Iterable[Sequence[Hashable]]) -> list[Any]:
    """Parameters of a product, of which some that have each value at least once are not slow."""
    rows = list(rows)
    return marked([pytest.param(*row, id="-".join(map(_name, row))) for row in rows], rows, together=1)


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
