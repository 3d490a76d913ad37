"""Handing a finished total over to autograd: the user's backward receives the staged gradients, times whatever factor
arrives (a division, a GradScaler's scale, a sum of losses), moved and not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit._errors import Refused

Factor = float | torch.Tensor
ALMOST = 2.0**-50
"""A factor this close to one is one: what two orders of adding up the same counts differ by."""


@dataclass
class Total:
    """The loss and gradients of an effective batch, on their way to the user's backward."""

    value: torch.Tensor
    """The loss, 0-dim, detached."""
    receivers: Sequence[torch.Tensor]
    """The parameters (and differentiable inputs) the gradients belong to."""
    gradients: list[torch.Tensor | None]
    """One per receiver; None where no micro-batch reached it. Emptied when handed over."""
    factor: Factor = 1.0
    """What every gradient still has to be multiplied by (one over the total weight, one over the loss scale)."""
    on_handover: Callable[[torch.Tensor], None] = field(default=lambda incoming: None)
    """Called with the incoming gradient of the loss before anything is handed over."""
    samples: int = 0
    """Samples in it."""
    weight: Factor = 1.0
    """What it weighs beside the totals of other processes."""
    rivals: Sequence[Factor] = ()
    """What it would weigh by the counts that could not be told apart from that."""
    watched: Sequence[Factor] = ()
    """What its known means beside other terms divide by."""
    incoming: Factor = 1.0
    """The gradient of the loss that backward came with."""
    unseen: bool = False
    """Whether what the loss computes from the outputs was not seen: then it is weighed by samples."""
    combine: Callable[[Factor], Factor] = field(default=lambda factor: factor)
    """Called with what every gradient has to be multiplied by, the user's own factor included, to make the total that of all
    processes; returns what is left to multiply by."""


def hand_over(total: Total) -> torch.Tensor:
    """The loss as a tensor whose backward gives the staged gradients to the receivers."""
    if torch._C._current_graph_task_id() == -1:
        _end_all()  # of a backward that raised, which calls no callbacks
    with torch.enable_grad():
        return _HandOver.apply(total, total.value, *total.receivers)  # type: ignore[no-any-return]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Total, value: torch.Tensor, *receivers: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        # A saved tensor makes autograd itself raise its own error on a second backward through a freed graph.
        ctx.save_for_backward(value)
        return value.clone()  # (no view: autograd forbids in-place operations on views made in here, as in `loss /= 4`)

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
    """What a loss gives its receivers, within a backward that hands it on to them: their hooks are called then, not here."""
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
    """The gradients times `factor`, in the receivers' precision; copies if they are to be kept, else moved out."""
    given: list[torch.Tensor | None] = []
    pending, total.gradients = total.gradients, list(total.gradients) if keep else []
    scaled = () if keep else _scale_together(pending, factor)
    pending.reverse()
    for index, receiver in enumerate(total.receivers):
        # One at a time and popped, so that nothing else holds a gradient when autograd takes it: then it is not copied.
        gradient = pending.pop()
        if gradient is None:
            _silence(receiver)
        left = 1.0 if index in scaled else factor
        given.append(None if gradient is None else _scaled(gradient, left, receiver.dtype, keep))
    return given


def _scale_together(gradients: Sequence[torch.Tensor | None], factor: Factor) -> Container[int]:
    """Multiply those gradients in place that one kernel can take at once; their indices."""
    if isinstance(factor, float) and factor == 1.0:
        return ()
    device = factor.device if isinstance(factor, torch.Tensor) else None
    found = {i: g for i, g in enumerate(gradients) if type(g) is torch.Tensor and g.layout is torch.strided}
    alike = {i: g for i, g in found.items() if device is None or g.device == device}
    if alike:
        torch._foreach_mul_(list(alike.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
    return frozenset(alike)


def _silence(receiver: torch.Tensor) -> None:
    """Let hooks of a tensor that no gradient reaches not be called in this backward, as they are not without memfit. One may
    still come to it another way (a penalty on parameters)."""
    if id(receiver) in _SILENCED:
        return  # another total of the same backward does not reach it either
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
"""Tensors whose hooks are silent until the backward that is running ends."""


def _instead(hooks: dict[int, Any], change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Other hooks until this backward ends."""
    kept = dict(hooks)
    hooks.update({key: change(hook) for key, hook in kept.items()})
    _at_the_end(lambda: hooks.update(kept))


def _at_the_end(undo: Callable[[], Any]) -> None:
    """Call this when the backward that is running ends."""
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
    """Raise Refused when backward runs with create_graph=True: staged gradients have no graph of their own."""
    if torch.is_grad_enabled():
        raise Refused(
            "backward with create_graph=True through a batch that memfit cuts",
            found="the gradients of micro-batches are gathered without a graph, so they cannot be differentiated again",
            next_move="run this part with memfit.wrap(..., enabled=False), or with a batch that fits whole",
        )


def graph_is_kept() -> bool:
    """Whether the backward that is running was called with retain_graph=True."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # pyright: ignore[reportAttributeAccessIssue]
    return True if query is None else bool(query())  # older torch cannot tell: copy, to be right


def _scaled(gradient: torch.Tensor, factor: Factor, dtype: torch.dtype, keep: bool) -> torch.Tensor:
    if isinstance(factor, float) and factor == 1.0:
        result = gradient.clone() if keep else gradient
    elif keep or gradient.is_sparse:
        result = gradient * factor
    else:
        result = gradient.mul_(factor)
    return result.to(dtype)


def _times(factor: Factor, incoming: torch.Tensor) -> Factor:
    factor, given = _on_host(factor), _on_host(incoming)
    if isinstance(factor, float) and isinstance(given, float):
        product = factor * given
        return 1.0 if abs(product - 1.0) < ALMOST else product
    return given if isinstance(factor, float) and factor == 1.0 else given * factor


def _on_host(factor: Factor) -> Factor:
    """A factor as a number where it is on the host anyway: multiplying by one then costs no pass over the gradients."""
    if isinstance(factor, float) or type(factor) is not torch.Tensor or factor.device.type != "cpu":
        return factor
    return float(factor.detach().numpy()) if factor.dtype in (torch.float32, torch.float64) else factor
