"""Makes iterators rewindable: training draws again what planning drew, and every micro-batch draws what the full batch would.

A generator or a loader's iterator can be neither copied nor reset. Once drawn from, it is replaced where it was found by a
`Rewound`, which buffers items as long as an `IteratorPosition` before them is held. Not covered: iterators inside other
iterators, iterators also held by a local variable of the loop, and `send` and `throw`, which go to the generator.
"""

from __future__ import annotations

import io
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from torch.utils._python_dispatch import _disable_current_modes

from memfit.engine.places import LONG, SIMPLE
from memfit.engine.user_code import is_installed


@dataclass(eq=True)
class IteratorPosition:
    """The number of items drawn."""

    number: int
    __hash__ = object.__hash__


class Rewound:
    """An iterator that can go back to any `IteratorPosition` that is still referenced."""

    of: weakref.WeakValueDictionary[int, Rewound] = weakref.WeakValueDictionary()
    """By the ids of the wrapped iterators, which they keep alive."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._drawn: deque[Any] = deque()
        self._first = self._next = 0
        self._held: weakref.WeakSet[IteratorPosition] = weakref.WeakSet()
        self.rehearsing = False
        """Whether the items will be drawn again. Past the end, the last item repeats."""

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
        """Draws a real item: tensors may be fake while rehearsing."""
        with _disable_current_modes() if self.rehearsing else nullcontext():
            return next(self._iterator)

    def _let_go(self) -> None:
        """Drop items that no position needs."""
        needed = min((position.number for position in self._held), default=self._next)
        while self._first < min(needed, self._next):
            self._drawn.popleft()
            self._first += 1


def position_of(rewound: Rewound) -> IteratorPosition:
    """Return the current position. The iterator can go back to it while it is referenced."""
    position = IteratorPosition(rewound._next)
    rewound._held.add(position)
    return position


def go_back(rewound: Rewound, position: IteratorPosition) -> None:
    """Rewind to a position."""
    rewound._next = position.number


def rewound_of(iterator: Iterator[Any]) -> Rewound:
    """Return the one `Rewound` of an iterator."""
    found = Rewound.of.get(id(iterator))
    if found is None:
        Rewound.of[id(iterator)] = found = Rewound(iterator)
    return found


def untouched(rewound: Rewound) -> Iterator[Any] | None:
    """Return the wrapped iterator if it was never drawn from, so that it can be unwrapped."""
    return None if rewound._first or rewound._drawn else rewound._iterator


@dataclass(frozen=True, eq=False)
class Drawn:
    """The position of an iterator, as a place with state."""

    rewound: Rewound
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return "drawn", id(self.rewound)

    def value(self) -> IteratorPosition:
        return position_of(self.rewound)

    def put(self, value: IteratorPosition) -> None:
        go_back(self.rewound, value)


def _is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python or of a library, whose future items cannot be inspected."""
    kind = type(value)
    draws = hasattr(kind, "__next__") and hasattr(kind, "__iter__") and not isinstance(value, (Rewound, io.IOBase))
    return draws and is_installed(kind.__module__)


def rewinding(value: Any, found: list[Rewound]) -> Any:
    """Make the iterators in a value rewindable and add them to `found`. Tuples are rebuilt."""
    if _is_iterator(value):
        found.append(rewound_of(value))
        return found[-1]
    if isinstance(value, types.MethodWrapperType) and value.__name__ == "__next__" and _is_iterator(value.__self__):
        found.append(rewound_of(cast("Iterator[Any]", value.__self__)))
        return found[-1].__next__
    if isinstance(value, tuple) and len(value) <= LONG:
        before = len(found)
        items = [item if type(item) in SIMPLE else rewinding(item, found) for item in value]
        if len(found) > before:
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore[attr-defined]
    return value


def only_draws(value: Any) -> bool:
    """Whether it has `__next__` and is not an iterator of the script, whose state is in its attributes."""
    kind = type(value)
    return hasattr(kind, "__next__") and (not hasattr(kind, "__iter__") or is_installed(kind.__module__))
