"""What hooks of the user's leave in Python objects is put back after planning, as what modules write is.

Hooks are part of the computation: they may replace outputs and gradients, and come in pairs. So planning runs them, on the
tensors that stand for data as well, and puts back what they can reach: variables and attributes, and lists, dicts, sets and
deques in these. Not covered: what they write elsewhere (files, other processes), tensors changed in place, objects that only
objects reached by them hold, and objects of installed packages, which may have threads of their own (loggers, trackers).
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where modules keep their hooks; with "_global" in front, where torch keeps those of all modules."""
DEEPEST = 3
"""Levels of containers within containers, and of functions within functions, that are looked at."""
_OPAQUE = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

Undo = Callable[[], None]


@contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """What the hooks in force on `model` can reach is afterwards as it was."""
    snapshot = _Snapshot()
    for hook in _hooks_of(model):
        snapshot.function(hook)
    try:
        yield
    finally:
        snapshot.restore()


def refilled(container: Any, items: Any) -> None:
    """Give the container the contents that it had, if they changed."""
    if isinstance(container, (list, deque)):
        if len(container) != len(items) or any(a is not b for a, b in zip(container, items)):
            container.clear()
            container.extend(items)
    elif isinstance(container, dict):
        if list(container) != list(items) or any(container[key] is not items[key] for key in items):
            kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # it keeps an order of its own
            kind.clear(container)
            kind.update(container, items)
    elif container != items:
        container.clear()
        container.update(items)


def put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Give an object the attributes that it had; at no moment is one missing."""
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)


class _Snapshot:
    """Everything reached so far, and how to put it back."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # ids: whoever looks for what holds a tensor must not find this
        self._undo: list[Undo] = []

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def function(self, hook: Any, depth: int = 0) -> None:
        """What a hook was given, closes over, belongs to, and looks up in its module."""
        if depth > DEEPEST or not self._is_new(hook):
            return
        if isinstance(hook, partial):
            self.function(hook.func, depth + 1)
            self._values((*hook.args, *hook.keywords.values()), depth)
            return
        owner = getattr(hook, "__self__", None if hasattr(hook, "__code__") else hook)
        made: Any = getattr(hook, "__func__", hook) if hasattr(hook, "__code__") else type(hook).__call__
        code = getattr(made, "__code__", None)
        if code is None or _is_installed(getattr(made, "__module__", None)):
            return
        for cell in made.__closure__ or ():
            self._cell(cell, depth)
        self._values((owner, *(made.__defaults__ or ()), *(made.__kwdefaults__ or {}).values()), depth)
        self._names(made.__globals__, code.co_names, depth)

    def _cell(self, cell: types.CellType, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        if self._is_new(cell):
            self._undo.append(lambda: setattr(cell, "cell_contents", value))
            self._values((value,), depth)

    def _names(self, known: dict[str, Any], names: tuple[str, ...], depth: int) -> None:
        """Globals that the code names: counters are rebound, containers refilled."""
        for name in names:
            if name in known and not isinstance(known[name], (types.FunctionType, *_OPAQUE)):
                value = known[name]
                self._undo.append(partial(known.__setitem__, name, value))
                self._values((value,), depth)

    def _values(self, values: tuple[Any, ...], depth: int) -> None:
        for value in values:
            if isinstance(value, (list, dict, set, deque)):
                self._container(value, depth)
            elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
                self.function(value, depth + 1)
            elif not isinstance(value, _OPAQUE) and not _is_installed(type(value).__module__):
                self._object(value, depth)

    def _container(self, container: Any, depth: int) -> None:
        if depth > DEEPEST or not self._is_new(container):
            return
        items = container.copy()
        self._undo.append(lambda: refilled(container, items))
        inside = list(items.values()) if isinstance(items, dict) else list(items)
        for item in inside:
            if isinstance(item, (list, dict, set, deque)):
                self._container(item, depth + 1)

    def _object(self, value: Any, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and self._is_new(value):
            items = dict(attributes)
            self._undo.append(lambda: put_back(attributes, items))
            for item in items.values():
                if isinstance(item, (list, dict, set, deque)):
                    self._container(item, depth + 1)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        return True


def _is_installed(module: str | None) -> bool:
    """Whether a module is not the user's: built in, of the standard library, of an installed package, or memfit's own."""
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is None or file.startswith(_INSTALLED) or (module or "").partition(".")[0] == "memfit"


def _hooks_of(model: nn.Module) -> Iterator[Any]:
    for kind in KINDS:
        yield from getattr(nn.modules.module, "_global" + kind, {}).values()
    for module in model.modules():
        for kind in KINDS:
            yield from getattr(module, kind, {}).values()
