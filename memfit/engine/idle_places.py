"""Tells which places no micro-batch of a pass moves, because its samples have nothing to count or to keep: `if rare.any():
self.last = out`. They keep their value. Rules for parts that move a place (rows, a sum over parts) would repeat it.

What is assigned may be the object that was there before: a small integer, an entry of a table. So each micro-batch finds a
stand-in, which is equal and another object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from memfit.engine.place_marks import is_at, mark_of
from memfit.engine.places import MISSING, AttributePlace, ItemPlace, Place, VariablePlace, with_graph

INTERNED = range(-5, 257)
"""Integers of which CPython keeps one object each."""


class IdlePlaces:
    """Compares these places before and after each micro-batch."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self._places = [with_graph(place) for place in places]
        self._detached = [place is not self._places[i] for i, place in enumerate(places)]
        self._certain = [True] * len(self._places)
        self._moved = [False] * len(self._places)
        self._begun: list[Any] = []

    def begin(self) -> None:
        """Begin a micro-batch."""
        for i, place in enumerate(self._places):
            self._certain[i] = self._certain[i] and _put_stand_in(place, self._detached[i])
        self._begun = [mark_of(place) for place in self._places]

    def end(self) -> None:
        """End a micro-batch."""
        for i, (place, begun) in enumerate(zip(self._places, self._begun)):
            self._moved[i] = self._moved[i] or not is_at(place, begun)

    def is_idle(self, index: int) -> bool:
        """Whether no micro-batch moved the place at this index, as far as can be told."""
        return not self._moved[index]

    def is_certain(self, index: int) -> bool:
        """Whether that can be told."""
        return self._certain[index]


def _put_stand_in(place: Place, detached: bool) -> bool:
    """Put an equal value into a place, as another object. Return whether a place that keeps it was not written. `detached`:
    whether the value may lose its graph."""
    if not isinstance(place, (ItemPlace, AttributePlace, VariablePlace)):
        return False
    value = place.value()
    if value is None or value is MISSING or isinstance(value, (bool, str)):
        return True  # parts that leave these leave what the whole batch does
    if isinstance(value, (list, dict, set, deque)) or (hasattr(value, "__dict__") and not isinstance(value, torch.Tensor)):
        return True  # what such an object holds are places of their own
    if type(value) is torch.Tensor and (detached or not value.requires_grad) and not value.is_inference():
        place.put(value.detach())
    elif type(value) is float or (type(value) is int and value not in INTERNED):
        place.put(value * 1)
    return place.value() is not value
