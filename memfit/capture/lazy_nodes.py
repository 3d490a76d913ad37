"""The autograd nodes of lazy tensors: the replay of a call, one operation on them, an in-place operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.capture.call import Call
from memfit.capture.expression import Output
from memfit.capture.lazy_tensor import LazyTensor, Owner, last_operation
from memfit.engine.handover import give, given_within, refuse_create_graph


class ReplayFunction(torch.autograd.Function):
    """Makes the lazy outputs of a call, of this `kind`. Its backward replays the call."""

    @staticmethod
    def forward(
        ctx: Any, kind: type[LazyTensor], owner: Owner, call: Call, wanted: tuple[int, ...], *receivers: torch.Tensor
    ) -> Any:
        ctx.owner, ctx.call, ctx.wanted = owner, call, wanted
        ctx.set_materialize_grads(False)
        # With a saved tensor, autograd raises its own error on a second backward through a freed graph.
        ctx.save_for_backward(torch.empty(0))
        made = []
        for i in wanted:
            leaf = call.outputs.leaves[i]
            made.append(kind.make(owner, call, Output((call.number, i)), leaf.shape_for(call.samples), leaf, leaf.axis))
        frozen = [s for s, i in zip(made, wanted) if not call.outputs.leaves[i].differentiable]
        ctx.mark_non_differentiable(*frozen)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if all(gradient is None for gradient in gradients):  # what came to depend on its outputs only by name
            return (None, None, None, None, *(None for _ in ctx.needs_input_grad[4:]))
        _ = ctx.saved_tensors
        refuse_create_graph()
        by_leaf: list[torch.Tensor | None] = [None] * len(ctx.call.outputs.leaves)
        for i, gradient in zip(ctx.wanted, gradients):
            by_leaf[i] = gradient
        given = _given_of_loss(ctx.owner, ctx.call, by_leaf)
        if given is None or any(gradient is not None for gradient in by_leaf):
            total = ctx.owner.replayed(ctx.call, tuple(by_leaf))
            given = _both(given, give(total, total.factor, keep=False))
        needed = ctx.needs_input_grad[4:]
        return (None, None, None, None, *(g if need else None for g, need in zip(given, needed)))


def _given_of_loss(
    owner: Owner, call: Call, by_leaf: list[torch.Tensor | None]
) -> Sequence[torch.Tensor | None] | None:
    """Gradients of the model's own loss, if C++ code used it unseen. It is weighted, while outputs are joined."""
    own = call.outputs.loss
    if own is None or by_leaf[own] is None or call.whole is not None:
        return None
    incoming, by_leaf[own] = by_leaf[own], None
    with torch.enable_grad():
        loss = owner.accumulate_own_loss(call)
    assert incoming is not None
    return given_within(loss, owner.receivers(call), incoming)


def _both(
    some: Sequence[torch.Tensor | None] | None, more: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    if some is None:
        return more
    return [b if a is None else a if b is None else a + b for a, b in zip(some, more)]


class Rewritten(torch.autograd.Function):
    """Replaces a stand-in by another one after an in-place operation."""

    @staticmethod
    def forward(ctx: Any, standin: LazyTensor, made: LazyTensor) -> LazyTensor:
        ctx.mark_dirty(standin)
        ctx.set_materialize_grads(False)
        return standin

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:  # type: ignore[override]
        return None, gradient


class Then(torch.autograd.Function):
    """One operation as an autograd node, for stand-ins used in C++. Inputs are the parents of what `make` returns, then other
    tensors added to it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], LazyTensor], *inputs: torch.Tensor) -> LazyTensor:
        made = make()
        ctx.node, ctx.samples, ctx.parents = made.node, made.call.samples, made.parents
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        parents, needed = ctx.parents, ctx.needs_input_grad[1:]
        with torch.enable_grad():
            starts = [parent.detached().detach() for parent in parents]
            wanted = [start.requires_grad_() for start, need in zip(starts, needed) if need]
            value = last_operation(ctx.node, parents, starts, ctx.samples)
            found = iter(torch.autograd.grad(value, wanted, gradient, allow_unused=True))
        own = [next(found) if need else None for need in needed[: len(parents)]]
        return None, *own, *(gradient if need else None for need in needed[len(parents) :])
