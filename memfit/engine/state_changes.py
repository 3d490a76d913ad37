"""Compares what places of user code hold with what they held, one function per kind of place, and tells data from the rest."""

from __future__ import annotations

import enum
import io
import logging
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from memfit.engine.places import (
    LONG,
    MISSING,
    SIMPLE,
    ArrayPlace,
    AssignedPlace,
    AttributePlace,
    BytesPlace,
    ContentsPlace,
    ItemPlace,
    Place,
    VariablePlace,
)
from memfit.engine.rewindable import Drawn, IteratorPosition, Rewound, position_of

KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where modules keep their hooks. Prefixed with "_global": where torch keeps the hooks of all modules."""
SHARED: tuple[type, ...] = (
    type, types.CodeType, types.GeneratorType, types.CoroutineType, types.FrameType, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, torch.jit.ScriptModule, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    DataLoader, Dataset, Sampler, enum.Enum, io.IOBase, logging.Logger, logging.Handler, threading.Thread,
    type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Condition, torch._C._FunctionBase,
)  # fmt: skip
CONTAINERS = (dict, list, set, deque)
OF_MODULES = frozenset((*KINDS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
OUR_ATTRIBUTES = ("forward", "training", *OF_MODULES)
"""Attributes of modules that are not state of a forward."""


def holds(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor has the values of a copy, which may be on another device."""
    return torch.equal(tensor.detach().to(copy.device), copy)


def moved_entries(holder: dict[Any, Any], before: dict[Any, Any], owner: str) -> list[tuple[Place, Any]]:
    """Return (place, value before) of the entries of a dictionary that changed, but for memfit's own."""
    found: list[tuple[Place, Any]] = []
    for name in [*before, *(name for name in holder if name not in before)]:
        value, now = before.get(name, MISSING), holder.get(name, MISSING)
        if now is not value and not (name in OUR_ATTRIBUTES or _is_ours(value) or _is_ours(now)):
            found.append((ItemPlace(holder, name, f"{owner}.{name}".lstrip(".")), value))
    return found


def moved_contents(container: Any, before: Any, owner: str) -> list[tuple[Place, Any]]:
    """Return (place, contents before) if a container changed."""
    same = len(container) == len(before) and all(a is b for a, b in zip(container, before))
    return [] if same else [(ContentsPlace(container, owner), list(before))]


def moved_data(
    tensor: torch.Tensor, data: torch.Tensor, place: tuple[Any, ...], name_of: Callable[[torch.Tensor], str]
) -> list[tuple[Place, Any]]:
    """Return (place, values before) if other data was assigned to a tensor through `.data`."""
    return [] if place_of(tensor) == place else [(AssignedPlace(tensor, name_of(data)), data.clone())]


def moved_position(rewound: Rewound, before: IteratorPosition) -> list[tuple[Place, Any]]:
    """Return (place, position before) if an iterator was drawn from."""
    return [] if position_of(rewound) == before else [(Drawn(rewound, "an iterator"), before)]


def moved_attribute(place: AttributePlace, before: Any) -> list[tuple[Place, Any]]:
    """Return (place, value before) if an attribute changed."""
    return [] if place.value() is before else [(place, before)]


def added_to(kind: type, before: frozenset[str]) -> list[tuple[Place, Any]]:
    """Return the attributes that a class did not have before."""
    added = [name for name in vars(kind) if name not in before and not name.startswith("__")]
    return [(AttributePlace(kind, name, f"{kind.__name__}.{name}"), MISSING) for name in added]


def moved_array(array: ArrayPlace, before: Any) -> list[tuple[Place, Any]]:
    """Return (place, array before) if a NumPy array changed."""
    return [] if array.array.tobytes() == before.tobytes() else [(array, before)]


def moved_bytes(place: BytesPlace, before: Any) -> list[tuple[Place, Any]]:
    """Return (place, items before) if a bytearray or an array changed."""
    return [] if place.container == before else [(place, before)]


def moved_variable(cell: types.CellType, before: Any) -> list[tuple[Place, Any]]:
    """Return (place, value before) if a closure variable changed."""
    return [] if cell.cell_contents is before else [(VariablePlace(cell, "a variable"), before)]


def moved_global(known: dict[str, Any], name: str, before: Any) -> list[tuple[Place, Any]]:
    """Return (place, value before) if a global variable changed."""
    return [] if known.get(name, MISSING) is before else [(ItemPlace(known, name, name), before)]


def _is_ours(value: Any) -> bool:
    # (stand-ins of outputs are what the script holds)
    return type(value).__module__.startswith("memfit") and not isinstance(value, torch.Tensor)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies: its storage, dtype and layout in it."""
    try:
        storage = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        storage = 0
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def is_data(name: str, value: Any) -> bool:
    """Whether a global or class attribute of this name may hold state."""
    return not name.startswith("__") and not isinstance(value, (types.ModuleType, type, types.FunctionType))


def holds_data(value: Any, depth: int = 3) -> bool:
    """Whether an object holds only numbers, strings, tensors, and containers and objects of these."""
    own = getattr(value, "__dict__", None)
    return own is not None and depth > 0 and all(_is_plain(item, depth) for item in own.values())


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) in SIMPLE or isinstance(value, (torch.Tensor, nn.Module, type, torch.dtype, torch.device)):
        return True
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= LONG and all(_is_plain(item, depth) for item in items)
    return not isinstance(value, SHARED) and holds_data(value, depth - 1)
