"""Finds forwards that use a tensor with a graph that was computed before the call: an attribute that another network computes,
a weight that a hook of the model itself normalizes. Every micro-batch would run backward through that graph, which the first
one frees. Not covered: several processes, sharded parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memfit._errors import Refused
from memfit.batches.tree import tensors
from memfit.capture.call import Call
from memfit.engine.call_context import uncompiled
from memfit.engine.gradients import is_sharded
from memfit.engine.known_means import nodes_of
from memfit.engine.planning_scope import reaching
from memfit.engine.recovery import surviving
from memfit.tracing.sandbox import leave_no_trace

Forward = Callable[[], tuple[Any, Any]]
"""Runs on few samples, and returns (the output, the arguments)."""


class EarlierGraph(Refused):
    """A forward uses a tensor with a graph that was computed before the call. Its backward runs once: no trace may run it."""


def refuse_earlier_graphs_of(call: Call) -> None:
    """Raise EarlierGraph if the forward of a call uses such a tensor."""
    looked_at = copy.copy(call)
    looked_at.copies = True

    def forward() -> tuple[Any, Any]:
        tree = looked_at.arguments(0, min(2, call.samples))
        with reaching(tree):
            return looked_at.output(tree), tree

    refuse_earlier_graphs(call.model, call.device, forward)


def refuse_earlier_graphs(model: nn.Module, device: torch.device, forward: Forward) -> None:
    """Raise EarlierGraph if `forward` uses such a tensor. If two forwards share nodes, these were there before."""
    if is_sharded(model):
        return

    def shared() -> set[Any]:
        with leave_no_trace(model, device), uncompiled(), torch.enable_grad():
            first, second = (_nodes(*forward()) for _ in range(2))
            return {node for node in first & second if not hasattr(node, "variable")}

    found = surviving(shared, device, lambda text: None)
    if not found or not _is_run_once(found, model):
        return
    held = (
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.grad_fn in found
    )
    raise EarlierGraph(
        "cutting the batch into micro-batches",
        found=f"the forward uses {next(held, 'a tensor')} with a graph that was computed before the call; every micro-batch "
        "would run backward through that graph, which the first one frees",
        next_move="pass it to the model as an argument, or compute it in the forward or in loss_fn; without micro_batch= and "
        "loss_fn=, a batch that fits runs whole",
    )


def _nodes(output: Any, arguments: Any) -> set[Any]:
    return set(nodes_of(tensors(output))) - set(nodes_of(tensors(arguments)))


def _is_run_once(nodes: set[Any], model: nn.Module) -> bool:
    """Whether backward cannot go through these nodes any number of times: they save tensors, or lead to the model's parameters,
    whose gradients micro-batches gather elsewhere."""
    own = {id(p) for p in model.parameters()}
    into = (following for node in nodes for following, _ in node.next_functions)
    return any(id(getattr(node, "variable", None)) in own for node in into) or any(map(any, map(_saved_by, nodes)))


def _saved_by(node: Any) -> Iterator[bool]:
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    yield from (bool(tensors(each)) for each in saved)
    yield bool(getattr(node, "saved_tensors", ()))
