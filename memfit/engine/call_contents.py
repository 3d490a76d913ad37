"""What lies inside a model's attributes at a call: entries of dictionaries, items of lists, attributes of the script's own
objects, and tensors that are no parameters. A deferred run gets what was there at the call; a tensor that was written in place
since cannot be given back, so that the run is refused.

Not covered: sets, objects of installed packages, and tensors written through `.data`.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from memfit.engine.state_changes import LONG, SHARED, SIMPLE
from memfit.engine.undo_state import is_installed
from memfit.engine.version_checks import Keys, Modified, keys_of_values, named

_WORTH: dict[tuple[Any, ...], Sequence[str]] = {}
DEPTH = 3
"""How many containers deep attributes are looked into."""
_PLAIN = (*SHARED, nn.Module, torch.Tensor, str, bytes)
_SCRIPTS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class CallContents:
    """The containers and tensors inside attributes of modules, as they were found."""

    def __init__(self, attributes: Sequence[dict[str, Any]], skipped: frozenset[str]) -> None:
        self.tables: list[dict[Any, Any]] = []
        self.lists: list[list[Any] | deque[Any]] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()
        for held in attributes:
            if buffers := held.get("_buffers"):
                for tensor in buffers.values():
                    self._look_at(tensor, 0)
            for name in _worth_a_look(held, skipped):
                self._look_at(held[name], DEPTH)
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
        if type(value).__module__.startswith("memfit."):
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_inference():
                self._tensors[id(value)] = value
            return
        if depth == 0 or isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for item in self._items(value):
            if type(item) not in SIMPLE:
                self._look_at(item, depth - 1)

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
        if type(held) is not dict or callable(value) or not _is_scripts(type(value)):
            return ()
        self.tables.append(held)
        return list(held.values())


def _worth_a_look(held: dict[str, Any], skipped: frozenset[str]) -> Sequence[str]:
    """Return the names of attributes that may hold others. Modules of a kind have the same."""
    key = (*held, *map(type, held.values()))
    names = _WORTH.get(key)
    if names is None:
        if len(_WORTH) >= LONG:
            _WORTH.clear()
        names = [name for name, value in held.items() if name not in skipped and _may_hold(value)]
        _WORTH[key] = names
    return names


def _may_hold(value: Any) -> bool:
    kind = type(value)
    if kind in SIMPLE or isinstance(value, _PLAIN) or kind.__module__.startswith("memfit."):
        return isinstance(value, torch.Tensor)
    return isinstance(value, (dict, list, deque, tuple)) or (not callable(value) and _is_scripts(kind))


def _is_scripts(kind: type) -> bool:
    if kind not in _SCRIPTS:
        data = issubclass(kind, (SimpleNamespace, Namespace)) or not is_installed(kind.__module__)
        _SCRIPTS[kind] = data and not hasattr(kind, "__next__")  # iterators are drawn from, not set
    return _SCRIPTS[kind]
