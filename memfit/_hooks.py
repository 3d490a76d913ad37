"""Refuses models whose hooks step an optimizer inside backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit._errors import Refused


def check_backward_hooks(model: nn.Module) -> None:
    """Raise Refused if a hook on a parameter may update it as soon as its gradient is ready."""
    for name, p in model.named_parameters():
        hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
        if hasattr(p, "_in_backward_optimizers") or any(_holds_optimizer(hook) for hook in hooks.values()):
            raise Refused(
                "an optimizer that steps inside backward",
                found=f"{name} has a hook that updates it as soon as its gradient is ready",
                next_move="remove those hooks and step the optimizer in the loop; memfit delivers the total gradient once",
            )


def _holds_optimizer(hook: Any) -> bool:
    """Whether a hook can reach an optimizer: as one of its own values, or by a lookup in code that calls some `step`."""
    given, looked_up = _reach(hook)
    return any(map(_is_optimizer, given)) or any(map(_is_optimizer, looked_up))


def _reach(hook: Any) -> tuple[list[Any], list[Any]]:
    """Return (the values a hook was created with, the values it can look up if its code calls a method `step`)."""
    if isinstance(hook, partial):
        given, looked_up = _reach(hook.func)
        return [*given, *hook.args, *hook.keywords.values()], looked_up
    owner = getattr(hook, "__self__", None if hasattr(hook, "__code__") else hook)
    function = getattr(hook, "__func__", hook) if hasattr(hook, "__code__") else type(hook).__call__
    code = getattr(function, "__code__", None)
    given = [owner, *_cells(function), *(getattr(function, "__defaults__", None) or ())]
    if code is None or "step" not in code.co_names:
        return given, []
    known = getattr(function, "__globals__", {})
    return given, [*getattr(owner, "__dict__", {}).values(), *(known[name] for name in code.co_names if name in known)]


def _cells(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_optimizer(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(v, torch.optim.Optimizer) for v in values)
