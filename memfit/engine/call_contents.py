"""What lies inside a model's attributes at a call, and inside what its code names: entries of dictionaries, items of lists,
attributes of the script's own objects, and tensors that are no parameters. A deferred run gets what was there at the call; a
tensor that was written in place since cannot be given back, so that the run is refused.

Not covered: sets, objects of installed packages, and tensors written through `.data`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from memfit.engine.forward_reads import ForwardReads
from memfit.engine.places import Place
from memfit.engine.state_changes import LONG
from memfit.engine.version_checks import Keys, Modified, keys_of_values, named

DEPTH = 3
"""How many containers deep values are looked into."""


class CallContents:
    """The containers and tensors inside these values, and the places that their code names, as they were found."""

    def __init__(self, values: Iterable[Any], code: Iterable[Any], reads: ForwardReads) -> None:
        self.tables: list[dict[Any, Any]] = []
        self.lists: list[list[Any] | deque[Any]] = []
        self.places: dict[Any, tuple[Place, Any]] = {}
        self._reads = reads
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()
        for each in code:
            self._name(each)
        kinds = reads.kinds
        for value in values:
            if kinds[type(value)]:
                self._look_at(value, DEPTH)
        self._written: torch.Tensor | None = None
        self._versions = [(tensor, tensor._version) for tensor in self._tensors.values()]

    def look(self, moved: Keys) -> None:
        """Remember a tensor that the script has written in place, other than at these places."""
        for tensor, version in self._versions:
            if tensor._version != version and not any(key in moved for key in keys_of_values(tensor, tensor)):
                self._written = tensor

    def accept_writes(self) -> None:
        """Take the tensors as they are now: memfit wrote them."""
        self._versions = [(tensor, tensor._version) for tensor, _ in self._versions]

    def check(self, when: str, moved: Keys) -> None:
        """Raise Modified if the script has written a tensor in place."""
        self.look(moved)
        if self._written is not None:
            raise Modified.of(named(self._written), "was written by the script after the call", when)

    def _look_at(self, value: Any, depth: int) -> None:
        kind = self._reads.kinds[type(value)]
        if kind == "tensor":
            if not value.is_inference():
                self._tensors[id(value)] = value
        elif kind == "code":
            self._name(value)
        elif kind and depth and id(value) not in self._seen:
            self._seen.add(id(value))
            for item in self._items(value):
                if self._reads.kinds[type(item)]:
                    self._look_at(item, depth - 1)

    def _name(self, code: Any) -> None:
        for place in self._reads.places(code):
            if place.key not in self.places:
                value = place.value()
                self.places[place.key] = place, value
                self._look_at(value, DEPTH)

    def _items(self, value: Any) -> Iterable[Any]:
        if isinstance(value, dict) and len(value) <= LONG:
            self.tables.append(value)
            return list(value.values())
        if isinstance(value, (list, deque)) and len(value) <= LONG:
            self.lists.append(value)
            return list(value)
        if isinstance(value, tuple):
            return value
        held = getattr(value, "__dict__", None)
        if type(held) is not dict or callable(value):
            return ()
        self.tables.append(held)
        self._name(type(value))
        return list(held.values())
