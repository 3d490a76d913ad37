"""Places where code may leave state (entries, attributes, closure variables, contents, tensors), to be read and put back."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.batches.tree import map_tensors
from memfit.engine.call_context import restore_tensors
from memfit.engine.version_checks import key_of

MISSING: Any = object()
"""The value of an absent entry."""
LONG = 10_000
"""Maximum number of entries of a container that is visited."""
SIMPLE = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice))
"""Types of values that hold no state."""


class Place(Protocol):
    """A place where code may leave state."""

    @property
    def label(self) -> str:
        """Name for messages."""
        ...

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the place while it exists."""
        ...

    def value(self) -> Any:
        """The current value, as a snapshot that later writes do not change."""
        ...

    def put(self, value: Any) -> None:
        """Set the value."""
        ...


@dataclass(frozen=True, eq=False)
class ItemPlace:
    """A dictionary entry: an attribute of an object, a global variable, a dictionary's item."""

    holder: dict[Any, Any]
    name: Any
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.holder), self.name

    def value(self) -> Any:
        return self.holder.get(self.name, MISSING)

    def put(self, value: Any) -> None:
        if value is MISSING:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value


@dataclass(frozen=True, eq=False)
class AttributePlace:
    """An attribute of a class, or of an object with a slot for it."""

    holder: Any
    name: str
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return "attribute", id(self.holder), self.name

    def value(self) -> Any:
        if isinstance(self.holder, type):
            return vars(self.holder).get(self.name, MISSING)  # not an inherited attribute
        return getattr(self.holder, self.name, MISSING)

    def put(self, value: Any) -> None:
        kind = type if isinstance(self.holder, type) else object  # bypasses the checks of frozen dataclasses
        try:
            kind.__delattr__(self.holder, self.name) if value is MISSING else kind.__setattr__(self.holder, self.name, value)
        except AttributeError:  # read-only after construction
            return


@dataclass(frozen=True, eq=False)
class VariablePlace:
    """A closure variable."""

    cell: types.CellType
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.cell),)

    def value(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # unassigned
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING:
            self.cell.cell_contents = value
        elif self.value() is not MISSING:
            del self.cell.cell_contents


def refill(container: list[Any] | deque[Any], items: Sequence[Any]) -> None:
    """Set the items, of a script's own class too, one by one where their number stays (it may be looping over them)."""
    kind: Any = list if isinstance(container, list) else deque
    if len(container) == len(items):
        for i, item in enumerate(items):
            kind.__setitem__(container, i, item)
    else:
        kind.clear(container)
        kind.extend(container, items)


def contents_of(value: Any) -> Any:
    """Return a copy of what a list, a deque or a dictionary holds; None for others."""
    return list(value) if isinstance(value, (list, deque)) else dict(value) if isinstance(value, dict) else None


def refilled(container: Any, items: Any) -> None:
    """Restore the contents of a container if they changed."""
    if isinstance(container, (list, deque)):
        if len(container) != len(items) or any(a is not b for a, b in zip(container, items)):
            refill(container, items)
    elif isinstance(container, dict):
        if list(container) != list(items) or any(container[key] is not items[key] for key in items):
            kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # it keeps its own order
            kind.clear(container)
            kind.update(container, items)
    elif container != items:
        container.clear()
        container.update(items)


def put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the attributes of an object. None of them is missing at any moment."""
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)


@dataclass(frozen=True, eq=False)
class ContentsPlace:
    """The items of a list or a deque."""

    container: list[Any] | deque[Any]
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.container),)

    def value(self) -> Any:
        return list(self.container)

    def put(self, value: Any) -> None:
        refill(self.container, value)


@dataclass(frozen=True, eq=False)
class BytesPlace:
    """The items of a bytearray or of an array of the standard library."""

    container: Any
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.container),)

    def value(self) -> Any:
        return self.container[:]

    def put(self, value: Any) -> None:
        self.container[:] = value


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """The values of a tensor."""

    tensor: torch.Tensor
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.tensor.untyped_storage()._cdata,)

    def value(self) -> torch.Tensor:
        return self.tensor.detach().clone()

    def put(self, value: torch.Tensor) -> None:
        restore_tensors([(self.tensor, value)])


@dataclass(frozen=True, eq=False)
class ArrayPlace:
    """The values of a NumPy array."""

    array: Any
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return "array", id(self.array)

    def value(self) -> Any:
        return self.array.copy()

    def put(self, value: Any) -> None:
        self.array[...] = value


@dataclass(frozen=True, eq=False)
class AssignedPlace:
    """The values of a tensor whose data was assigned (`p.data = ...`) and has another storage now."""

    tensor: torch.Tensor
    label: str

    @property
    def key(self) -> tuple[Any, ...]:
        return key_of(self.tensor)

    def value(self) -> torch.Tensor:
        return self.tensor.detach().clone()

    def put(self, value: torch.Tensor) -> None:
        restore_tensors([(self.tensor, value)])


@dataclass(frozen=True, eq=False)
class WithoutGraph:
    """The value of another place, detached from the graph of its micro-batch, which backward frees."""

    place: Place

    @property
    def label(self) -> str:
        return self.place.label

    @property
    def key(self) -> tuple[Any, ...]:
        return self.place.key

    def value(self) -> Any:
        return without_graph(self.place.value())

    def put(self, value: Any) -> None:
        self.place.put(value)


def without_graph(value: Any) -> Any:
    """Detach every tensor in a tree that has been computed. Leaves stay themselves: a recurrent network lists its weights."""
    return map_tensors(lambda tensor: tensor if tensor.is_leaf else tensor.detach(), value)


def with_graph(place: Place) -> Place:
    """Return the place itself, whose value may have a graph."""
    return place.place if isinstance(place, WithoutGraph) else place
