"""A copy of an optimizer over copies (twins) of its parameters. It steps like the original, which stays unchanged."""

from __future__ import annotations

import copy
import os
import traceback
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.engine.state_changes import SHARED
from memfit.hardware.exhausted import is_out_of_memory

STEPPED_BY_LISTS = ("cuda", "xpu")
"""Devices where optimizers use foreach by default. torch decides that by the type of the tensors, which differs while tracing
(`_default_to_fused_or_foreach` in torch/optim/optimizer.py)."""


_OWN = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def shadow_optimizer(
    optimizer: Optimizer,
    parameter: Callable[[torch.Tensor], torch.Tensor | None],
    twin: Callable[[torch.Tensor], torch.Tensor],
) -> Optimizer:
    """Build an optimizer with the same settings over the twins of the parameters, without hooks and patched methods. What else
    its `step` may write is a twin, too: tensors in its attributes, and objects there, such as an optimizer that it wraps."""
    return _Shadows(parameter, twin).of_optimizer(optimizer)


class _Shadows:
    """What a shadow of an optimizer refers to."""

    def __init__(
        self, parameter: Callable[[torch.Tensor], torch.Tensor | None], twin: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._parameter, self._twin = parameter, twin
        self._made: dict[int, tuple[Any, Any]] = {}
        """Optimizers, objects and containers (which keep their ids while they are held here) and their shadows."""

    def of_optimizer(self, optimizer: Any) -> Any:
        """Return the shadow of an optimizer."""
        shadow = self._remember(optimizer, object.__new__(type(optimizer)))
        # First the groups and the state: a wrapper may share them with the optimizer that it wraps.
        groups, state = self._of_groups(optimizer.param_groups), self._of_state(optimizer.state)
        vars(shadow).update({name: self._of(value) for name, value in vars(optimizer).items() if name not in _OWN})
        vars(shadow).pop("step", None)  # schedulers put their counting step on the instance
        for name in _OWN[2:]:
            vars(shadow)[name] = OrderedDict()
        for name, value in (("param_groups", groups), ("state", state)):
            with suppress(AttributeError):  # a property that returns those of the one that it wraps
                setattr(shadow, name, value)
        return shadow

    def _remember(self, value: Any, shadow: Any) -> Any:
        self._made[id(value)] = value, shadow
        return shadow

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # slow weights, master weights
            found = self._parameter(value)
            return self._twin(value) if found is None else found
        if id(value) in self._made:
            return self._made[id(value)][1]
        if type(value) in (list, tuple, set, deque):
            return self._remember(value, type(value)(map(self._of, value)))
        if isinstance(value, dict):
            return self._of_dict(value)
        if _is_optimizer(value):
            return self.of_optimizer(value)
        if _has_attributes(value):
            made = self._remember(value, object.__new__(type(value)))
            vars(made).update({name: self._of(each) for name, each in vars(value).items()})
            return made
        return value

    def _of_dict(self, held: dict[Any, Any]) -> Any:
        """The shadow of a dictionary. Entries of parameters that have no twin are left out."""
        made = self._remember(held, copy.copy(held))
        made.clear()
        for key, value in held.items():
            owner = self._parameter(key) if isinstance(key, torch.Tensor) else key
            if owner is not None:
                made[owner] = self._of(value)
        return made

    def _of_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if id(groups) in self._made:
            return self._made[id(groups)][1]
        return self._remember(groups, [self._of_group(group) for group in groups])

    def _of_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) in self._made:
            return self._made[id(group)][1]
        found = {k: self._twin(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        params = [q for q in map(self._parameter, group["params"]) if q is not None]
        return self._remember(group, found | {"params": params})

    def _of_state(self, states: dict[Any, Any]) -> Any:
        if id(states) in self._made:
            return self._made[id(states)][1]
        found: defaultdict[Any, Any] = self._remember(states, defaultdict(dict))
        for p, state in states.items():
            owner = self._parameter(p) if isinstance(p, torch.Tensor) else p
            if owner is not None:
                found[owner] = self._of(state)
        return found


def held_by(optimizer: Any) -> str | None:
    """Return the name of an attribute through which an optimizer's `step` may change more than its parameters and their state:
    one that holds another optimizer, or a tensor of several elements that is no parameter. None if there is none."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in (*_OWN, "defaults", "step") and any(id(each) not in own for each in _reached(value, set())):
            return name
    return None


def stepped_by(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds, whose `step` it may call."""
    found, seen = [optimizer], set[int]()
    for each in found:
        own = (one for value in vars(each).values() for one in _reached(value, seen) if _is_optimizer(one))
        found += [one for one in own if all(one is not known for known in found)]
    return found


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors and optimizers in an attribute of an optimizer, as far as its shadow has twins of them."""
    if isinstance(value, torch.Tensor):
        yield from (value,) if value.numel() > 1 else ()
    elif isinstance(value, torch.nn.Module):
        yield from (each for each in (*value.parameters(), *value.buffers()) if each.numel() > 1)
    elif _is_optimizer(value):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        held: Any = ()
        if isinstance(value, dict):
            held = value.values()
        elif type(value) in (list, tuple, set, deque):
            held = value
        elif _has_attributes(value):
            held = vars(value).values()
        for each in held:
            yield from _reached(each, seen)


def _is_optimizer(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad")) and not isinstance(value, type)


def _has_attributes(value: Any) -> bool:
    """Whether it is an object with state, as a running average of the parameters."""
    shared = isinstance(value, SHARED) and not isinstance(value, torch.optim.lr_scheduler.LRScheduler)
    other = shared or isinstance(value, (torch.nn.Module, types.ModuleType)) or callable(value)
    plain = type(value).__new__ is object.__new__
    return plain and not other and type(getattr(value, "__dict__", None)) is dict


def step(shadow: Optimizer) -> None:
    """Step like the original. If its own code raises (a mode the script sets later, a closure it needs), step like its
    torch.optim base class, or else allocate two state tensors per parameter."""
    try:
        with warnings.catch_warnings():  # a scheduler looks for its mark on `step`
            warnings.simplefilter("ignore")
            shadow.step()
        return
    except Exception as error:
        if is_out_of_memory(error) or not _is_own(error):
            raise
    kinds = (kind for kind in type(shadow).__mro__[1:] if kind.__module__.startswith("torch.optim") and kind is not Optimizer)
    base = next((kind for kind in kinds if "step" in vars(kind)), None)
    if base is not None:
        base.step(shadow)  # type: ignore[attr-defined]
        return
    for group in shadow.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not shadow.state[parameter]:
                shadow.state[parameter].update(first=torch.zeros_like(parameter), second=torch.zeros_like(parameter))


def _is_own(error: Exception) -> bool:
    """Whether code that is not torch's was running, though it may have failed inside torch: a closure that is None."""
    ours = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
    return any(not frame.filename.startswith(ours) for frame in traceback.extract_tb(error.__traceback__))


def step_by_lists(optimizer: Optimizer) -> None:
    """Enable foreach for parameter groups that would use it on CUDA (`_default_to_fused_or_foreach` in
    torch/optim/optimizer.py)."""
    for group in optimizer.param_groups:
        plain = not group.get("fused") and not group.get("differentiable")
        if "foreach" in group and group["foreach"] is None and plain:
            group["foreach"] = True


def states(optimizer: Optimizer) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield each key of the optimizer's state (mostly a parameter) with its state tensors."""
    for parameter, state in optimizer.state.items():
        values = state.values() if isinstance(state, dict) else ()
        yield parameter, [value for value in values if isinstance(value, torch.Tensor)]
