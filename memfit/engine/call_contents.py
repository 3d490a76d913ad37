"""What lies inside a model's attributes at a call, and inside what its code names: entries of dictionaries, items of lists,
attributes of the script's own objects and of other modules, and tensors that are no parameters. A deferred run gets what was
there at the call; a tensor that was written in place since cannot be given back, so that the run is refused.

Not covered: sets, objects of installed packages, and tensors written through `.data`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.engine.forward_reads import CodeWalk, ForwardReads
from memfit.engine.places import LONG
from memfit.engine.state_changes import OF_MODULES
from memfit.engine.version_checks import Keys, Modified, keys_of_values, named

DEPTH = 3
"""How many containers deep values are looked into."""
MOST = 2 * LONG
"""How many values are looked at in all."""


class CallContents:
    """The containers and tensors inside these values of a model, and the places that its code names, as they were found.
    `known` are ids of objects that are not looked into. `versions`: its tensors, each at its version."""

    def __init__(self, values: Iterable[Any], code: Iterable[Any], reads: ForwardReads, known: Iterable[int] = ()) -> None:
        self.tables: list[dict[Any, Any]] = []
        self.objects: list[dict[str, Any]] = []
        self.lists: list[list[Any] | deque[Any]] = []
        self.arrays: dict[int, Any] = {}
        self._kinds, self._walk = reads.kinds, CodeWalk(reads)
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen = set(known)
        self._looked_at = 0
        self.have_graphs = False
        self._look_into(values)
        for each in code:
            self._walk.add(each)
        self._walk.run()
        while self._walk.values:  # whose classes have methods, which may name more
            found, self._walk.values = self._walk.values, []
            self._look_into(found)
            self._walk.run()
        self.places = self._walk.places
        self._written: torch.Tensor | None = None
        self.versions = [(tensor, tensor._version) for tensor in self._tensors.values()]

    def look(self, moved: Keys) -> None:
        """Remember a tensor that the script has written in place, other than at these places."""
        for tensor, version in self.versions:
            if tensor._version != version and not any(key in moved for key in keys_of_values(tensor, tensor)):
                self._written = tensor

    def accept_writes(self) -> None:
        """Take the tensors as they are now: memfit wrote them."""
        self.versions = [(tensor, tensor._version) for tensor, _ in self.versions]

    def let_go(self) -> None:
        """Let go of graphs, which no gradient reaches any more."""
        self.places = {key: (place, without_graph(value)) for key, (place, value) in self.places.items()}
        self._tensors = {}
        self.versions = [(tensor, version) for tensor, version in self.versions if tensor.grad_fn is None]

    def check(self, when: str, moved: Keys) -> None:
        """Raise Modified if the script has written a tensor in place."""
        self.look(moved)
        if self._written is not None:
            raise Modified.of(named(self._written), "was written by the script after the call", when)

    def _look_into(self, values: Iterable[Any]) -> None:
        kinds = self._kinds
        level = [value for value in values if kinds[type(value)]]
        for _ in range(DEPTH + 1):
            level = [item for value in level for item in self._items(value) if kinds[type(item)]]

    def _items(self, value: Any) -> Sequence[Any]:
        kind = self._kinds[type(value)]
        if kind == "tensor":
            self.have_graphs = self.have_graphs or value.grad_fn is not None
            if not value.is_inference():
                self._tensors[id(value)] = value
        elif kind == "ours":
            self.have_graphs = True
        elif kind == "code":
            self._walk.add(value)
        elif kind == "array":
            self.arrays[id(value)] = value
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            found = self._inside(value)
            self._looked_at += len(found)
            return found
        return ()

    def _inside(self, value: Any) -> Sequence[Any]:
        if isinstance(value, (dict, list, deque, tuple)):
            if len(value) > LONG or self._looked_at > MOST:
                return ()
            if isinstance(value, dict):
                self.tables.append(value)
                return list(value.values())
            if not isinstance(value, tuple):
                self.lists.append(value)
            return list(value)
        held = getattr(value, "__dict__", None)
        if type(held) is not dict:
            return ()
        self.objects.append(held)
        self._walk.add(type(value))
        if not isinstance(value, nn.Module):
            return list(held.values())
        buffers = held.get("_buffers") or {}
        self.tables += [buffers] if buffers else []
        own = (each for name, each in held.items() if name not in OF_MODULES)
        return [*own, *buffers.values(), *(held.get("_modules") or {}).values()]


def without_graph(value: Any) -> Any:
    """Return a tensor without its graph; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return Ours() if type(value).__module__.startswith("memfit.") else value.detach()


class Ours:
    """Stands for an output that memfit answers for, which is never put back."""
