"""Copies a block's arguments, so that recomputation gets the same values again.

Copies what may be mutated and can hold tensors: lists, dictionaries, sets and objects with attributes, recursively. Shares
tensors, modules, functions and torch's own objects. Not covered: tensors written in place, which autograd itself detects, and
objects that cannot be copied or keep their contents outside their attributes.
"""

from __future__ import annotations

import copy
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_SHARED = (
    torch.Tensor, nn.Module, str, bytes, int, float, complex, Enum, type,
    FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial,
)  # fmt: skip


def as_it_was(value: Any, seen: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a copy that later writes to `value` do not reach, or `value` itself if nothing in it is mutable."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, _SHARED):
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, tuple):
        return _tuple(value, seen)
    if type(value).__module__.split(".")[0] == "torch":
        return value
    try:
        made = copy.copy(value)
    except Exception:
        return value  # the object itself refuses to be copied
    seen[id(value)] = value, made
    if isinstance(made, list):
        made[:] = [as_it_was(item, seen) for item in made]
    elif isinstance(made, dict):
        for key, item in value.items():
            dict.__setitem__(made, key, as_it_was(item, seen))
    attributes = getattr(made, "__dict__", None)
    if type(attributes) is dict and made is not value:
        for name, item in list(attributes.items()):
            attributes[name] = as_it_was(item, seen)
    return made


def _tuple(value: tuple[Any, ...], seen: dict[int, tuple[Any, Any]]) -> Any:
    made = [as_it_was(item, seen) for item in value]
    if all(new is old for new, old in zip(made, value)):
        return value
    make = getattr(type(value), "_make", None)
    return tuple.__new__(type(value), made) if make is None else make(made)
