"""Refusals of what cannot be had from an output whose batch runs in micro-batches with its loss."""

from __future__ import annotations

from typing import Any

from memfit._errors import Refused
from memfit.capture.lazy_tensor import LazyTensor


def refuse_as_goal(goals: Any) -> None:
    """Raise Refused for `torch.autograd.grad` with respect to an output that never existed as a whole."""
    found = [g for g in (goals if isinstance(goals, (tuple, list)) else (goals,)) if isinstance(g, LazyTensor)]
    if any(goal.materialized is None for goal in found):
        raise Refused(
            "torch.autograd.grad with respect to the model's output",
            found="the batch ran in micro-batches with its loss, so the whole output never existed",
            next_move="call output.retain_grad() before computing the loss from it",
        )


def refuse_part(func: Any) -> None:
    """An operation on an output and a sharded parameter. torch has no gradients for it either."""
    raise Refused(
        f"{func.__name__} of a model output and a sharded parameter",
        found='shard="parameters" makes parameters torch.distributed.tensor.DTensor outside the forward, which do not mix '
        "with other tensors",
        next_move="use the optimizer's weight_decay, compute this inside the model's forward or in loss_fn=, or pass "
        'shard="optimizer"',
    )


def refuse_watching(output: Any) -> None:
    """A model that returns its loss computes it from its outputs inside, where their gradients are not available. What a
    forward leaves in an attribute may be used in the rest of it, too."""
    cut = isinstance(output, LazyTensor) and output.call.whole is None
    leaf = output.call.outputs.leaves[output.leaf] if cut and output.leaf >= 0 else None
    if leaf is not None and leaf.is_beside and leaf.axis is not None:
        raise Refused(
            f"the gradient of {leaf.path[0]}, which the forward leaves beside its output",
            found="the batch runs in micro-batches, and what the rest of the forward adds to that gradient is not joined",
            next_move="register the hook inside the forward (it then runs once per micro-batch), or let the batch run whole",
        )
    if cut and output.call.outputs.loss is not None and not output.is_own_loss:
        raise Refused(
            "the gradient of an output beside the model's own loss",
            found="the batch runs in micro-batches with its loss, which hides what the loss adds to that gradient",
            next_move="compute the loss from the output in the script, or let the batch run whole",
        )


def refuse_late(output: Any) -> None:
    """A loss computed from it before has already accumulated its gradients, past any hook."""
    if not isinstance(output, LazyTensor) or output.materialized is not None:
        return
    if output.is_loss_that_waits:
        if not output.is_apart:
            raise Refused(
                "reading the gradient of a loss",
                found="its gradients accumulate with those of another loss that it is part of, past any hook",
                next_move="call retain_grad() or register_hook() before adding it to others",
            )
    elif output.call.pending:
        raise Refused(
            "reading the gradient of the model's output",
            found="the batch ran in micro-batches with its loss, so the whole gradient of the output never existed",
            next_move="call output.retain_grad() or output.register_hook() before computing the loss from it",
        )
