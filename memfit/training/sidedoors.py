"""Finding what goes in and out of a forward by other ways than its arguments and its output.

Tensors with a graph that stay behind in attributes or in forward hooks' lists are refused by name: cut into micro-batches,
only the last one's would be seen, and gradients through them would be lost. Parameters of other modules that the forward
uses are found, so that their gradients are staged too. Not covered: values kept detached, and what happens only under
conditions the looked-at samples do not meet.
"""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memfit._errors import Refused
from memfit.batches.tree import leaves, tensors
from memfit.engine.context import uncompiled
from memfit.profiling.sandbox import leave_no_trace
from memfit.training.call import Call


@dataclass(frozen=True)
class SideEntrances:
    """What a forward uses and changes beside its module's own state."""

    parameters: tuple[torch.Tensor, ...]
    """Parameters that the module does not hold and that receive gradients through it."""
    writes_input: bool
    """Whether it writes into the tensors it is given."""


def look_for_side_doors(call: Call, samples: int, allowed: Sequence[str] = ()) -> SideEntrances:
    """Raise Refused if a tensor with a graph survives the call's forward without being part of its output.

    `allowed` are names (a module's attribute, such as "encoder.aux_loss") that the user accepts.
    """
    named = _computed_by_hooks(call.model)
    looked_at = copy.copy(call)
    looked_at.copies = True
    with leave_no_trace(call.model, call.device), uncompiled(), torch.enable_grad():
        tree = looked_at.arguments(0, samples)
        given = [(t, t._version) for t in tensors(tree)]
        watch = _Made()
        with watch:
            output = looked_at.output(tree)
        mine = {id(leaf) for _, leaf in leaves(output)}
        alive = [t for t in (reference() for reference in watch.made) if t is not None and id(t) not in mine]
        names = [name for name in _holders(alive, call.model) if name not in named and name not in allowed]
        own = {id(t) for t in (*call.model.parameters(), *(t for t, _ in given))}
        leaves_ = _graph_leaves(tensors(output))
        strangers = tuple(p for p in leaves_ if isinstance(p, nn.Parameter) and id(p) not in own)
        found = SideEntrances(strangers, any(t._version != version for t, version in given))
    if names:
        raise Refused(
            "cutting the batch into micro-batches",
            found=f"{names[0]} holds a tensor with a graph after the forward; of several micro-batches only the last would "
            "be left there, and its gradient would be lost",
            next_move=f"return it from forward, store it detached, or accept that with allow_inexact=[{names[0]!r}]",
        )
    return found


def _graph_leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a backward from `outputs` would leave gradients in."""
    open_, seen, found = [t.grad_fn for t in outputs if t.grad_fn is not None], set(), []
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)  # pyright: ignore[reportAttributeAccessIssue]
        open_ += [following for following, _ in node.next_functions]
    return found


class _Made(TorchFunctionMode):
    """Weak references to all tensors with a graph that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and item.grad_fn is not None:
                self.made.append(weakref.ref(item))
        return out


def _holders(alive: list[torch.Tensor], model: nn.Module) -> list[str]:
    """Names of what holds on to these tensors, other than the graph itself."""
    if not alive:
        return []
    wanted = {id(t) for t in alive}
    places = {id(m.__dict__): (name, m.__dict__) for name, m in model.named_modules()}
    found = []
    for holder in gc.get_referrers(*alive):
        if holder is alive or isinstance(holder, (types.FrameType, types.CellType)):
            continue
        if id(holder) in places:
            name, attributes = places[id(holder)]
            found += [f"{name}.{key}" if name else key for key, value in attributes.items() if id(value) in wanted]
        elif isinstance(holder, (list, dict, set)):
            where = _container(holder, places)
            found += [where] if where else []
    return list(dict.fromkeys(found))


def _container(holder: Any, places: dict[int, tuple[str, dict[str, Any]]]) -> str | None:
    for name, attributes in places.values():
        for key, value in attributes.items():
            if value is holder:
                return f"{name}.{key}" if name else key
    owners = gc.get_referrers(holder)
    if any(isinstance(owner, torch._C._FunctionBase) for owner in owners):
        return None  # what a custom autograd function keeps for its backward
    if any(isinstance(owner, types.FrameType) and "memfit" in owner.f_code.co_filename for owner in owners):
        return None
    return "a list outside the model (filled by a forward hook?)" if isinstance(holder, list) else None


def _computed_by_hooks(model: nn.Module) -> set[str]:
    """Attributes that a hook computes anew before every forward (weight norm, spectral norm)."""
    return {
        f"{name}.{hook.name}" if name else hook.name  # type: ignore[attr-defined]
        for name, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(getattr(hook, "name", None), str)
    }
