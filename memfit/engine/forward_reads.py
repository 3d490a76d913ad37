"""What a forward may read besides its arguments and its modules' entries: globals that the script's code names, variables of
closures, class attributes, and what lies inside of values.

Found by class and by function, once per wrapped model: a global that a function names only after it was replaced is not found.
"""

from __future__ import annotations

import dis
import enum
import functools
import types
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from memfit.engine.places import MISSING, AttributePlace, ItemPlace, Place, VariablePlace
from memfit.engine.state_changes import LONG, SHARED, SIMPLE, is_data
from memfit.engine.undo_state import is_installed

_PLAIN = (*SHARED, nn.Module, nn.Parameter, str, bytes)


class ForwardReads:
    """What is known of classes and functions that a model's values have."""

    def __init__(self) -> None:
        self.kinds = _Kinds()
        # A script may make a function at every step, whose variables hold tensors.
        self._places: weakref.WeakKeyDictionary[Any, tuple[Place, ...]] = weakref.WeakKeyDictionary()

    def places(self, code: Any) -> tuple[Place, ...]:
        """Return the places that a class or a function reads by name."""
        while not isinstance(code, type) and (inner := getattr(code, "__func__", None) or getattr(code, "func", None)):
            code = inner
        if not isinstance(code, (type, types.FunctionType)):
            return ()
        found = self._places.get(code)
        if found is None:
            walk = _Walk()
            walk.look(code)
            found = self._places[code] = tuple(walk.found)
        return found


class _Kinds(dict[type, str]):
    """What is to be looked at in values of a type: a "tensor", "items", "code", or "" for nothing."""

    def __missing__(self, kind: type) -> str:
        if len(self) >= LONG:
            self.clear()
        found = self[kind] = _look_of(kind)
        return found


def _look_of(kind: type) -> str:
    if issubclass(kind, torch.Tensor):
        return "" if issubclass(kind, nn.Parameter) or kind.__module__.startswith("memfit.") else "tensor"
    if issubclass(kind, (types.FunctionType, types.MethodType, functools.partial)):
        return "code"
    if kind in SIMPLE or issubclass(kind, _PLAIN) or kind.__module__.startswith("memfit."):
        return ""
    if issubclass(kind, (dict, list, deque, tuple)):
        return "items"
    return "items" if is_scripts(kind) and not hasattr(kind, "__next__") else ""  # iterators are drawn from, not set


def is_scripts(kind: type) -> bool:
    """Whether values of this type hold data of the script."""
    return issubclass(kind, (SimpleNamespace, Namespace)) or not is_installed(kind.__module__)


class _Walk:
    """Follows the script's code from function to function."""

    def __init__(self) -> None:
        self.found: list[Place] = []
        self._seen: set[int] = set()

    def look(self, value: Any) -> None:
        """Add the places that a class, a function or a method reads, and that those read which it names."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.look(value.__func__)
        elif isinstance(value, functools.partial):
            self.look(value.func)
        elif isinstance(value, types.ModuleType) and not is_installed(value.__name__):
            self._add(ItemPlace(vars(value), name, name) for name, held in list(vars(value).items()) if is_data(name, held))

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_installed(base.__module__) or issubclass(base, enum.Enum):
                continue
            for name, item in list(vars(base).items()):
                if isinstance(item, (staticmethod, classmethod)):
                    self.look(item.__func__)
                elif isinstance(item, property):
                    self.look(item.fget)
                elif isinstance(item, types.FunctionType):
                    self.look(item)
                elif not name.startswith("__") and not hasattr(type(item), "__get__"):
                    self._add([AttributePlace(base, name, f"{base.__name__}.{name}")])

    def _function(self, function: types.FunctionType) -> None:
        known = function.__globals__
        if is_installed(known.get("__name__")):
            return
        self._add(VariablePlace(cell, "a variable") for cell in function.__closure__ or ())
        self._add(ItemPlace(known, name, name) for name in sorted(set(_globals_in(function.__code__))) if name in known)

    def _add(self, places: Iterable[Place]) -> None:
        for place in places:
            value = place.value()
            if value is not MISSING and not isinstance(value, (types.ModuleType, type)):
                self.found.append(place)
            self.look(value)


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the globals that code and its inner functions read. (`co_names` has attributes, too.)"""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_in(constant)
