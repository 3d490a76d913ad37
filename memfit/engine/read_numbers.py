"""Numbers and words that a forward may branch on: in attributes of the script's own modules and objects, in dictionaries there,
in globals and in variables of closures. Calls under others may do something else: a model in stages, a task's number.

Not covered: values that change at nearly every call without the forward ever doing something else (counters).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

Numbers = dict[Hashable, Any]
"""Values by where they were found: the number of a container and a name in it, or the number of a place that code names."""
MOST = 8
"""Values of one place after which, if the forward did the same under all of them, the place is no longer watched."""


def is_word(value: Any) -> bool:
    """Whether it is a number, a text or None."""
    return value is None or type(value) in (bool, int, float, str)


def sign_of(value: Any) -> Any:
    """Return what of a value may decide: the sign of a float (a rate that is annealed), else the value."""
    return math.copysign(1.0, value) if type(value) is float and value else value


class Variants:
    """Tells calls of one signature apart by the numbers that they were made with, where those change what the model does."""

    def __init__(self) -> None:
        self._known: list[tuple[Numbers, int]] = []
        self._values: defaultdict[Hashable, set[Any]] = defaultdict(set)
        self._counters: set[Hashable] = set()

    def of(self, numbers: Numbers) -> int | None:
        """Return the variant of calls with these numbers, or None if they are new."""
        watched = self._watched(numbers)
        return next((variant for known, variant in reversed(self._known) if known == watched), None)

    def choose(self, numbers: Numbers, does_the_same: Callable[[int], bool]) -> int:
        """Return the variant for new numbers: the latest under which the model `does_the_same`, else another one."""
        variants = list(dict.fromkeys(variant for _, variant in reversed(self._known)))
        found = next(filter(does_the_same, variants), None)
        if found is None:
            self._known.append((self._watched(numbers), len(variants)))
            return len(variants)
        for place, value in numbers.items():
            self._values[place].add(value)
        self._known.append((numbers, found))
        self._counters |= {place for place, values in self._values.items() if len(values) > MOST}
        self._known = [(self._watched(known), variant) for known, variant in self._known]
        return found

    def _watched(self, numbers: Numbers) -> Numbers:
        if not self._counters:
            return numbers
        return {place: value for place, value in numbers.items() if place not in self._counters}
