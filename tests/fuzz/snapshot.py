"""What a script leaves behind: everything that its names lead to, as numbers and tensors by path; and how far two of these are apart."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Snapshot = dict[str, Any]
SKIPPED = frozenset({"BATCH", "run", "loader", "dataset", "batch", "print", "samples", "batches", "draws"})
"""Names of a script that stand for the data, or for memfit's own."""
PLUMBING = frozenset({"forward", "training"}) | {
    name for name in vars(nn.Linear(1, 1)) if name.startswith("_") and name not in ("_parameters", "_buffers", "_modules")
}
FLOOR = 1e-2
"""Numbers smaller than this are compared as if they were as large."""


def snapshot(names: Mapping[str, Any], printed: list[tuple[Any, ...]]) -> Snapshot:
    """Everything that a script's names lead to, with what it printed and where the generators of random numbers stand."""
    found: Snapshot = {}
    seen: dict[int, Any] = {}
    for name, value in names.items():
        if name not in SKIPPED and not name.startswith("__"):
            for path, leaf in _leaves(name, value, seen):
                found[path] = leaf
    for i, line in enumerate(printed):
        for j, value in enumerate(line):
            found[f"printed[{i}][{j}]"] = value
    found["random of torch"] = torch.get_rng_state()
    found["random of numpy"] = str(np.random.get_state())
    found["random of python"] = str(random.getstate())
    return found


def _leaves(path: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        yield path, value
        return
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)) or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, type):
        own = vars(value).items() if value.__module__ == "fuzz_script" else ()
        yield from _leaves(path, {k: v for k, v in own if not k.startswith("__") and not hasattr(v, "__get__")}, seen)
        return
    if hasattr(type(value), "__slots__") and type(value).__module__ == "fuzz_script":
        yield from _leaves(path, {name: getattr(value, name, None) for name in type(value).__slots__}, seen)
        return
    if isinstance(value, (np.ndarray, np.generic)):
        yield path, torch.as_tensor(value).clone()
        return
    if isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, Tensor):
        yield from _of_tensor(path, value)
    elif isinstance(value, nn.Module):
        for name, inner in vars(value).items():
            if name not in PLUMBING:
                yield from _leaves(f"{path}.{name}", inner, seen)
    elif isinstance(value, Optimizer):
        for i, group in enumerate(value.param_groups):
            yield from _leaves(f"{path}.groups[{i}]", {k: v for k, v in group.items() if k != "params"}, seen)
            for j, p in enumerate(group["params"]):
                yield from _leaves(f"{path}.state[{i}][{j}]", dict(value.state.get(p, {})), seen)
                yield from _of_tensor(f"{path}.params[{i}][{j}]", p)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}[{key!r}]" if not isinstance(key, Tensor) else f"{path}[tensor]", inner, seen)
    elif isinstance(value, (list, tuple, deque)):
        yield f"len({path})", len(value)
        for i, inner in enumerate(value):
            yield from _leaves(f"{path}[{i}]", inner, seen)
    elif isinstance(value, functools.partial):
        yield from _leaves(f"{path}.func", value.func, seen)
        yield from _leaves(f"{path}.args", value.args, seen)
    elif isinstance(value, types.MethodType):
        yield from _leaves(f"{path}.__self__", value.__self__, seen)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            yield from _leaves(f"{path}.<{name}>", cell.cell_contents, seen)
    elif hasattr(value, "__dict__") and type(value).__module__ in ("fuzz_script", "torch.optim.lr_scheduler"):
        yield from _leaves(path, {k: v for k, v in vars(value).items() if k not in ("optimizer", "lr_lambdas")}, seen)


def _of_tensor(path: str, value: Tensor) -> Iterator[tuple[str, Any]]:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, FakeTensor):
        yield path, "a fake tensor"
        return
    try:
        yield path, torch.as_tensor(value.detach()).clone()
    except RuntimeError as error:
        yield path, f"cannot be read: {error}"
        return
    if value.is_leaf:
        gradient = value.grad
        if isinstance(gradient, FakeTensor):
            yield f"{path}.grad", "a fake tensor"
        else:
            yield f"{path}.grad", None if gradient is None else gradient.detach().clone()


def apart(one: Snapshot, other: Snapshot) -> dict[str, float]:
    """How far the entries of two snapshots are apart, relative to the largest number of each; infinite for another kind."""
    found = {path: float("inf") for path in one.keys() ^ other.keys()}
    for path in one.keys() & other.keys():
        distance = _distance(one[path], other[path])
        if distance:
            found[path] = distance
    return found


def _distance(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        if not one.is_floating_point():
            return 0.0 if torch.equal(one, other) else float("inf")
        if one.numel() == 0 or torch.equal(one, other):
            return 0.0
        if not torch.equal(one.isnan(), other.isnan()):
            return float("inf")
        one, other = one.nan_to_num(), other.nan_to_num()
        return float((one - other).abs().max() / max(float(one.abs().max()), FLOOR))
    if isinstance(one, float) and isinstance(other, float):
        return 0.0 if one == other or (one != one and other != other) else abs(one - other) / max(abs(one), FLOOR)
    if type(one) is not type(other):
        return float("inf")
    return 0.0 if one == other else float("inf")
