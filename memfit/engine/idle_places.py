"""Tells which places no micro-batch of a pass moves, because its samples have nothing to count or to keep: `if rare.any():
self.last = out`. They keep their value. Rules for parts that move a place (rows, a sum over parts) would repeat it.

Not covered: entries of arrays and tensors that are written through NumPy or `.data` with the values that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.engine.place_marks import is_at, mark_of
from memfit.engine.places import ArrayPlace, AssignedPlace, Place, TensorPlace, with_graph

INTERNED = range(-5, 257)
"""Integers of which CPython keeps one object each: the same object does not say that nothing was assigned."""


class IdlePlaces:
    """Compares these places before and after each micro-batch."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self._places = [with_graph(place) for place in places]
        self._begun: list[Any] = []
        self._moved = [False] * len(self._places)

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._begun = [mark_of(place) for place in self._places]

    def end(self) -> None:
        """End a micro-batch."""
        for i, (place, begun) in enumerate(zip(self._places, self._begun)):
            self._moved[i] = self._moved[i] or not is_at(place, begun)

    def is_idle(self, index: int) -> bool:
        """Whether no micro-batch moved the place at this index, as far as can be told."""
        return not self._moved[index]

    def is_certain(self, index: int) -> bool:
        """Whether that is certain: something that is assigned there would be another object."""
        place, value = self._places[index], self._begun[index]
        return not isinstance(place, (TensorPlace, AssignedPlace, ArrayPlace)) and not _is_interned(value)


def unless_same(before: torch.Tensor, values: Sequence[torch.Tensor], joined: torch.Tensor) -> torch.Tensor:
    """Return `before` if all values are the same, else `joined`, without waiting for the device."""
    same = torch.stack([(value == before).all() for value in values]).all()
    return torch.where(same, before, joined)


def _is_interned(value: Any) -> bool:
    return type(value) is int and value in INTERNED
