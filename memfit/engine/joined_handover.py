"""Runs a forward unchanged and hands over a staged total in its backward, for ranks that must add up their gradients.

Aliases replace the parameters during the forward and end its graph. Backward first runs through that graph from the gradients
of the outputs; the parameters then receive the total. Not covered: outputs without gradients, and tensors that leave the
forward in another way than its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from memfit.batches.tree import map_leaves
from memfit.engine.handover import Total, give, graph_is_kept, refuse_create_graph
from memfit.engine.staged import Staging

Finish = Callable[[list[torch.Tensor | None], Sequence[torch.Tensor]], Total]
"""Makes the total from the staged gradients of these parameters."""


def joined(run: Callable[[], Any], staging: Staging, finish: Finish, weight: float = 1.0) -> Any:
    """Return the output of `run` with its tensors connected to the parameters through `finish`. `weight` multiplies gradients
    of sharded parameters, which are reduced across ranks while they accumulate."""
    receivers = staging.parameters()
    with staging.swapped() if staging.parts is None else staging.counting():
        output = run()
    inside: list[torch.Tensor] = []

    def collected(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            inside.append(leaf)
        return leaf

    map_leaves(collected, output)
    if not inside:
        return output
    outside = iter(_Joined.apply(staging, (finish, weight), tuple(inside), len(receivers), *receivers))

    def replaced(leaf: Any) -> Any:
        return next(outside) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf

    return map_leaves(replaced, output)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        staging: Staging,
        then: tuple[Finish, float],
        inside: tuple[torch.Tensor, ...],
        count: int,
        *receivers: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.staging, (ctx.finish, ctx.weight), ctx.inside, ctx.receivers = staging, then, inside, receivers
        outputs = tuple(tensor.detach() for tensor in inside)
        ctx.save_for_backward(torch.empty(0))  # autograd then raises its own error on a second backward
        return outputs

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        refuse_create_graph()
        keep = graph_is_kept()
        reached = [(t, g) for t, g in zip(ctx.inside, incoming) if g is not None]
        if reached:
            tensors, gradients = zip(*reached)
            if ctx.staging.parts is not None:
                gradients = [gradient * ctx.weight for gradient in gradients]
            with ctx.staging.counting(), ctx.staging.swapped() if ctx.staging.parts is not None else nullcontext():
                torch.autograd.backward(tensors, gradients, retain_graph=keep)
        with ctx.staging.counting():
            total = ctx.finish(ctx.staging.take(ctx.receivers), ctx.receivers)
        if not keep:
            ctx.inside = ()
        return (None, None, None, None, *give(total, total.factor, keep=False))
