"""Hands a finished total over to autograd. The user's backward receives the staged gradients, moved and not copied, times the
incoming gradient (a division, a GradScaler's scale, a sum of losses)."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit._errors import Refused

Factor = float | torch.Tensor
ALMOST = 2.0**-50
"""Distance from 1 up to which a factor counts as 1: the rounding error of adding the same counts in another order."""


@dataclass
class Total:
    """The loss and gradients of an effective batch, for the user's backward."""

    value: torch.Tensor
    """The loss, 0-dim, detached."""
    receivers: Sequence[torch.Tensor]
    """The parameters (and differentiable inputs) that the gradients belong to."""
    gradients: list[torch.Tensor | None]
    """One per receiver; None if no micro-batch reached it. Emptied at handover."""
    factor: Factor = 1.0
    """Remaining factor of every gradient (one over the total weight, one over the loss scale)."""
    on_handover: Callable[[torch.Tensor], None] = field(default=lambda incoming: None)
    """Called with the loss's incoming gradient before the handover."""
    samples: int = 0
    """Samples in the effective batch."""
    weight: Factor = 1.0
    """Its weight relative to other ranks' totals."""
    parts: list[torch.Tensor | None] | None = None
    """Gradients of sharded parameters, reduced over the ranks; None until no rank adds to them any more."""
    rivals: Sequence[Factor] = ()
    """Weights by the other counts that the proof could not tell apart from the weighting."""
    watched: Sequence[Factor] = ()
    """Denominators of its known means beside other terms."""
    incoming: Factor = 1.0
    """The loss's incoming gradient."""
    unseen: bool = False
    """Whether memfit did not see what the loss computes from the outputs. It is then weighted by samples."""
    calls: int = 0
    """How many of the script's calls it is of; 0 if nobody said."""
    combine: Callable[[Factor], Factor] = field(default=lambda factor: factor)
    """Reduces the total across ranks. Called with the factor of every gradient, the user's included. Returns the remaining
    factor."""


def hand_over(total: Total) -> torch.Tensor:
    """Return the loss as a tensor whose backward gives the staged gradients to the receivers."""
    if torch._C._current_graph_task_id() == -1:
        _end_all()  # left by a backward that raised, which runs no callbacks
    with torch.enable_grad():
        return _HandOver.apply(total, total.value, *total.receivers)  # type: ignore[no-any-return]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Total, value: torch.Tensor, *receivers: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        # With a saved tensor, autograd raises its own error on a second backward through a freed graph.
        ctx.save_for_backward(value)
        return value.clone()  # not a view: autograd forbids in-place operations such as `loss /= 4` on views made here

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        refuse_create_graph()
        total: Total = ctx.total
        total.on_handover(incoming)
        total.incoming = _on_host(incoming)
        factor = total.combine(_times(total.factor, incoming))
        given = give(total, factor, keep=graph_is_kept())
        needed = ctx.needs_input_grad[2:]
        return (None, None, *(gradient if need else None for gradient, need in zip(given, needed)))


def given_within(
    loss: torch.Tensor, receivers: Sequence[torch.Tensor], incoming: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Return a loss's gradients inside a backward that passes them on to the receivers, where their hooks are called."""
    if getattr(loss.grad_fn, "_forward_cls", None) is _HandOver:
        return loss.grad_fn.apply(incoming)[2:]  # type: ignore[union-attr]
    hooks = [(receiver._backward_hooks, dict(receiver._backward_hooks)) for receiver in receivers if receiver._backward_hooks]
    try:
        for called, _ in hooks:
            called.clear()
        return torch.autograd.grad(loss, receivers, incoming, allow_unused=True)
    finally:
        for called, kept in hooks:
            called.update(kept)


def give(total: Total, factor: Factor, *, keep: bool) -> list[torch.Tensor | None]:
    """Return the gradients times `factor`, in the receivers' dtypes; copies with `keep`, else moved out."""
    given: list[torch.Tensor | None] = []
    pending, total.gradients = total.gradients, list(total.gradients) if keep else []
    scaled = () if keep else _scale_together(pending, factor)
    pending.reverse()
    for index, receiver in enumerate(total.receivers):
        # Popped one at a time, so that autograd holds the only reference and takes the gradient over without a copy.
        gradient = pending.pop()
        if gradient is None:
            _silence(receiver)
        left = 1.0 if index in scaled else factor
        given.append(None if gradient is None else _scaled(gradient, left, receiver.dtype, keep))
    return given


def _scale_together(gradients: Sequence[torch.Tensor | None], factor: Factor) -> Container[int]:
    """Scale in place, in one foreach call, the gradients that allow it. Returns their indices."""
    if isinstance(factor, float) and factor == 1.0:
        return ()
    found = {i: g for i, g in enumerate(gradients) if type(g) is torch.Tensor and g.layout is torch.strided}
    for device in {g.device for g in found.values()}:
        alike = [g for g in found.values() if g.device == device]
        torch._foreach_mul_(alike, _near(factor, device))  # pyright: ignore[reportPrivateImportUsage]
    return frozenset(found)


def _silence(receiver: torch.Tensor) -> None:
    """Until this backward ends, silence the hooks of a tensor that gets no gradient, as without memfit. A gradient that
    reaches it another way (a penalty on parameters) still calls them."""
    if id(receiver) in _SILENCED:
        return  # another total in the same backward does not reach it either
    came: list[bool] = []
    before, after = receiver._backward_hooks, getattr(receiver, "_post_accumulate_grad_hooks", None)
    if before:
        _instead(before, lambda hook: lambda gradient: None if gradient is None else hook(gradient))
    if after:
        seen = receiver.register_hook(lambda gradient: None if gradient is None else came.append(True))
        _instead(after, lambda hook: lambda tensor: hook(tensor) if came else None)
        _at_the_end(seen.remove)
    if before or after:
        _SILENCED.add(id(receiver))
        _at_the_end(lambda: _SILENCED.discard(id(receiver)))


_SILENCED: set[int] = set()
"""Ids of tensors whose hooks are silent until the running backward ends."""


def _instead(hooks: dict[int, Any], change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace hooks until the running backward ends."""
    kept = dict(hooks)
    hooks.update({key: change(hook) for key, hook in kept.items()})
    _at_the_end(lambda: hooks.update(kept))


def _at_the_end(undo: Callable[[], Any]) -> None:
    """Call `undo` when the running backward ends."""
    _UNDONE_AT_THE_END[undo] = None
    torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(undo))


_UNDONE_AT_THE_END: dict[Callable[[], Any], None] = {}


def _end(undo: Callable[[], Any]) -> None:
    if undo in _UNDONE_AT_THE_END:
        del _UNDONE_AT_THE_END[undo]
        undo()


def _end_all() -> None:
    for undo in list(_UNDONE_AT_THE_END):
        _end(undo)


def refuse_create_graph() -> None:
    """Raise Refused for a backward with create_graph=True: staged gradients have no graph."""
    if torch.is_grad_enabled():
        raise Refused(
            "backward with create_graph=True through a batch that memfit cuts",
            found="the gradients of micro-batches are gathered without a graph, so they cannot be differentiated again",
            next_move="run this part with memfit.wrap(..., enabled=False), or with a batch that fits whole",
        )


def graph_is_kept() -> bool:
    """Whether the running backward was called with retain_graph=True."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # pyright: ignore[reportAttributeAccessIssue]
    return True if query is None else bool(query())  # older torch cannot tell: copy, to be safe


def _scaled(gradient: torch.Tensor, factor: Factor, dtype: torch.dtype, keep: bool) -> torch.Tensor:
    factor = _near(factor, gradient.device)
    if isinstance(factor, float) and factor == 1.0:
        result = gradient.clone() if keep else gradient
    elif keep or gradient.is_sparse:
        result = gradient * factor
    else:
        result = gradient.mul_(factor)
    return result.to(dtype)


def _near(factor: Factor, device: torch.device) -> Factor:
    """The factor on the device of a gradient: one model may have parameters on several."""
    return factor.to(device) if isinstance(factor, torch.Tensor) else factor


def _times(factor: Factor, incoming: torch.Tensor) -> Factor:
    factor, given = _on_host(factor), _on_host(incoming)
    if isinstance(factor, float) and isinstance(given, float):
        product = factor * given
        return 1.0 if abs(product - 1.0) < ALMOST else product
    return given if isinstance(factor, float) and factor == 1.0 else given * factor


def _on_host(factor: Factor) -> Factor:
    """The factor as a number if it is on the CPU: a factor of 1 then costs no pass over the gradients."""
    if isinstance(factor, float) or type(factor) is not torch.Tensor or factor.device.type != "cpu":
        return factor
    return float(factor.detach().numpy()) if factor.dtype in (torch.float32, torch.float64) else factor
