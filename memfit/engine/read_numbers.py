"""Numbers and words that a forward may branch on: in attributes of the script's own modules and objects, in dictionaries there,
in globals and in variables of closures. Calls under others may do something else: a model in stages, a task's number.

Not covered: values that change at nearly every call without the forward ever doing something else (counters).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Set
from typing import Any, NamedTuple

MOST = 8
"""Values of one place after which, if the forward did the same under all of them, the place is no longer watched."""


def is_word(value: Any) -> bool:
    """Whether it is a number, a text or None."""
    return value is None or type(value) in (bool, int, float, str)


class Numbers(NamedTuple):
    """Numbers and words at a call."""

    values: dict[Hashable, Any]
    """By where they were found: the number of a container and a name in it, or the number of a place that code names."""
    moved: set[Hashable]
    """Where the forward itself moves them."""

    def add(self, place: Hashable, value: Any, *, moved: bool) -> None:
        """Add one. Of a float only the sign decides: it may be a rate that is annealed."""
        if moved:
            self.moved.add(place)
        else:
            self.values[place] = math.copysign(1.0, value) if type(value) is float and value else value


class Variants:
    """Tells calls of one signature apart by the numbers that they were made with, where those change what the model does."""

    def __init__(self) -> None:
        self._known: list[tuple[dict[Hashable, Any], int]] = []
        self._values: defaultdict[Hashable, set[Any]] = defaultdict(set)
        self._left_out: set[Hashable] = set()

    def of(self, numbers: Numbers) -> int | None:
        """Return the variant of calls with these numbers, or None if they are new."""
        if not numbers.moved <= self._left_out:
            self._leave_out(numbers.moved)
        watched = self._watched(numbers.values)
        return next((variant for known, variant in reversed(self._known) if known == watched), None)

    def choose(self, numbers: Numbers, does_the_same: Callable[[int], bool]) -> int:
        """Return the variant for new numbers: the latest under which the model `does_the_same`, else another one."""
        variants = list(dict.fromkeys(variant for _, variant in reversed(self._known)))
        found = next(filter(does_the_same, variants), None)
        self._known.append((self._watched(numbers.values), len(variants) if found is None else found))
        if found is None:
            return len(variants)
        for place, value in numbers.values.items():
            self._values[place].add(value)
        self._leave_out({place for place, values in self._values.items() if len(values) > MOST})
        return found

    def _leave_out(self, places: Set[Hashable]) -> None:
        self._left_out |= places
        self._known = [(self._watched(known), variant) for known, variant in self._known]

    def _watched(self, values: dict[Hashable, Any]) -> dict[Hashable, Any]:
        if not self._left_out:
            return values
        return {place: value for place, value in values.items() if place not in self._left_out}
