"""What a forward may read besides its arguments and its modules' attributes: globals that the script's code names, variables of
closures, and class attributes.

Followed from forward, hooks and functions in attributes to the functions and methods that these name. Not followed: code of
installed packages, and names that are made up at run time.
"""

from __future__ import annotations

import dis
import enum
import functools
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from memfit.engine.places import LONG, SIMPLE, AttributePlace, ItemPlace, Place, VariablePlace
from memfit.engine.state_changes import SHARED
from memfit.engine.user_code import is_installed

_PLAIN = (*SHARED, nn.Parameter, str, bytes)
_NOT_CALLED = frozenset(("__init__", "__new__", "__repr__", "__str__", "__del__", "__init_subclass__", "__setstate__"))
"""Methods with a name of Python's that a forward does not call. It may call others without naming them."""


class Names(NamedTuple):
    """What code names."""

    globals: tuple[str, ...]
    others: frozenset[str]
    """Attributes, and words that may be given to `getattr`."""


class ForwardReads:
    """What is known of code and types, once per wrapped model. Nothing of it refers to values of the script."""

    def __init__(self) -> None:
        self.kinds = _Kinds()
        self.roots = {"forward"}
        self._names: dict[int, tuple[types.CodeType, Names]] = {}
        self._installed: dict[str, bool] = {}

    def names(self, code: types.CodeType) -> Names:
        """Return what code and its inner functions name."""
        found = self._names.get(id(code))
        if found is None:
            if len(self._names) >= LONG:
                self._names.clear()
            found = self._names[id(code)] = code, _names_in(code)
        return found[1]

    def is_installed(self, module: Any) -> bool:
        """Whether a module is not the script's."""
        if type(module) is not str or module == "__main__":
            return False
        found = self._installed.get(module)
        if found is None:
            found = self._installed[module] = is_installed(module)
        return found


class _Kinds(dict[type, str]):
    """What is to be looked at in values of a type: a "tensor", an "array", "items", "code", memfit's "ours", or ""
    for nothing."""

    def __missing__(self, kind: type) -> str:
        found = _look_of(kind)
        if is_installed(kind.__module__):  # a class that a script makes at every step may hold tensors
            self[kind] = found
        return found


def _look_of(kind: type) -> str:
    if issubclass(kind, torch.Tensor):
        ours = "ours" if kind.__module__.startswith("memfit.") else "tensor"
        return "" if issubclass(kind, nn.Parameter) else ours
    if issubclass(kind, (types.FunctionType, types.MethodType, functools.partial)):
        return "code"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return "array"
    if issubclass(kind, LRScheduler):
        return "items"
    if kind in SIMPLE or issubclass(kind, _PLAIN) or kind.__module__.startswith("memfit."):
        return ""
    if issubclass(kind, (dict, list, deque, tuple, SimpleNamespace, Namespace, nn.Module)):
        return "items"
    draws = any("__next__" in vars(base) for base in kind.__mro__)  # iterators are drawn from, not set
    return "" if draws or is_installed(kind.__module__) else "items"


class CodeWalk:
    """Follows the script's code. `places` are what it reads, with the value of each; `values` those not yet looked into."""

    def __init__(self, reads: ForwardReads) -> None:
        self.places: dict[Any, tuple[Place, Any]] = {}
        self.values: list[Any] = []
        self._reads = reads
        self._functions: deque[types.FunctionType] = deque()
        self._seen: set[int] = set()
        self._names: set[str] = set(reads.roots)
        self._named = 0
        self._classes: dict[type, None] = {}
        self._modules: dict[types.ModuleType, None] = {}

    def add(self, value: Any) -> None:
        """Follow a function, a method, or a class as far as its methods are named."""
        while isinstance(value, (types.MethodType, functools.partial)):
            value = value.__func__ if isinstance(value, types.MethodType) else value.func
        if isinstance(value, types.FunctionType):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._functions.append(value)
        elif isinstance(value, type) and value not in self._classes and not issubclass(value, enum.Enum):
            if not self._reads.is_installed(value.__module__):
                self._classes[value] = None
                self._named = 0

    def run(self) -> None:
        """Follow all that was added."""
        while self._functions or self._named < len(self._names):
            while self._functions:
                self._function(self._functions.popleft())
            self._named = len(self._names)
            for kind in list(self._classes):
                self._class(kind)
            for module in list(self._modules):
                self._read(ItemPlace(vars(module), name, name) for name in sorted(self._names & vars(module).keys()))

    def _function(self, function: types.FunctionType) -> None:
        cells = function.__closure__ or ()
        if self._reads.is_installed(function.__globals__.get("__name__")):  # a package's wrapper around the script's function
            held = [VariablePlace(cell, "").value() for cell in cells] if hasattr(function, "__wrapped__") else []
            for value in (*held, getattr(function, "__wrapped__", None)):
                self.add(value)
            return
        named, known = self._reads.names(function.__code__), function.__globals__
        self._names |= named.others
        self._read(VariablePlace(cell, "a variable") for cell in cells)
        self._read(ItemPlace(known, name, name) for name in named.globals if name in known)
        self.values += function.__defaults__ or ()

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if self._reads.is_installed(base.__module__):
                continue
            for name, item in list(vars(base).items()):
                called = name in self._names or (name.startswith("__") and name not in _NOT_CALLED)
                if called and isinstance(item, (staticmethod, classmethod)):
                    self.add(item.__func__)
                elif called and isinstance(item, property):
                    self.add(item.fget)
                elif called and isinstance(item, (types.FunctionType, functools.partial)):
                    self.add(item)
                elif name in self._names and not name.startswith("__") and not hasattr(type(item), "__get__"):
                    # A subclass may get one of its own.
                    self._read(AttributePlace(each, name, f"{each.__name__}.{name}") for each in {base, kind})

    def _read(self, places: Iterable[Place]) -> None:
        for place in places:
            if place.key in self.places:
                continue
            value = place.value()
            if isinstance(value, types.ModuleType):
                if not self._reads.is_installed(value.__name__) and value not in self._modules:
                    self._modules[value] = None
                    self._named = 0
            elif not isinstance(value, type):
                self.places[place.key] = place, value
                self.values.append(value)
            self.add(value)


def _names_in(code: types.CodeType) -> Names:
    codes = list(_inner(code))
    opened = (each for one in codes for each in dis.get_instructions(one))
    found = {each.argval for each in opened if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    words = {each for one in codes for each in one.co_consts if type(each) is str and each.isidentifier()}
    return Names(tuple(sorted(found)), frozenset(words.union(*(one.co_names for one in codes))))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inner(constant)
