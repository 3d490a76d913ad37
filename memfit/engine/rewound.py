"""Iterators that code draws from, made to go back: what planning draws is drawn again by training, and all micro-batches of a
batch draw what the whole would.

A generator or a loader's iterator cannot be copied nor set back. One that was drawn from stays, in the places where it was
found, in a `Rewound` that remembers items as long as somebody may go back to them. Not covered: iterators within other
iterators, those that a local variable of the loop holds as well, and `send` and `throw`, which go to the generator.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes


@dataclass(eq=True)
class Position:
    """How many items were drawn."""

    number: int
    __hash__ = object.__hash__


class Rewound:
    """An iterator that goes back to any `Position` that somebody still holds."""

    of: weakref.WeakValueDictionary[int, Rewound] = weakref.WeakValueDictionary()
    """By the ids of the iterators, which they keep."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._drawn: deque[Any] = deque()
        self._first = self._next = 0
        self._held: weakref.WeakSet[Position] = weakref.WeakSet()
        self.rehearsing = False
        """Whether what is drawn is drawn again: more may be drawn then than there is."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == self._first + len(self._drawn):
            try:
                self._drawn.append(self._another())
            except StopIteration:
                if self.rehearsing and self._drawn:
                    return self._drawn[-1]
                raise
        item = self._drawn[self._next - self._first]
        self._next += 1
        self._let_go()
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def _another(self) -> Any:
        """The next item, for real: while rehearsing, tensors may be fake."""
        with _disable_current_modes() if self.rehearsing else nullcontext():
            return next(self._iterator)

    def _let_go(self) -> None:
        """Forget items that nobody can go back to."""
        needed = min((position.number for position in self._held), default=self._next)
        while self._first < min(needed, self._next):
            self._drawn.popleft()
            self._first += 1


def position_of(rewound: Rewound) -> Position:
    """Where it stands; it can go back there as long as this is held."""
    position = Position(rewound._next)
    rewound._held.add(position)
    return position


def go_back(rewound: Rewound, position: Position) -> None:
    """Let it stand there."""
    rewound._next = position.number


def rewound_of(iterator: Iterator[Any]) -> Rewound:
    """The one that stands for an iterator wherever it is found."""
    found = Rewound.of.get(id(iterator))
    if found is None:
        Rewound.of[id(iterator)] = found = Rewound(iterator)
    return found


def untouched(rewound: Rewound) -> Iterator[Any] | None:
    """The iterator itself, which may take its place again where nothing was ever drawn from it."""
    return None if rewound._first or rewound._drawn else rewound._iterator


@dataclass(frozen=True, eq=False)
class Drawn:
    """What was drawn from an iterator: a place where state lies."""

    rewound: Rewound
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return "drawn", id(self.rewound)

    def value(self) -> Position:
        return position_of(self.rewound)

    def put(self, value: Position) -> None:
        go_back(self.rewound, value)
