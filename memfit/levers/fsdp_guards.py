"""Raises errors where a script would take a shard for the whole, or a parameter for the one that has taken its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memfit._errors import Refused

_AT_ONCE: list[object] = []
"""One entry for each model that is sharded now."""


def refuse_numbers_of_shards() -> Callable[[], None]:
    """Make `item()` of a DTensor raise Refused where it would return a number of this rank's part only, as torch does
    (`_local_scalar_dense` in torch/distributed/tensor/_sharding_prop.py). Returns what undoes this."""
    from torch.distributed.tensor import DTensor

    handlers, operator = DTensor._op_dispatcher._custom_op_handlers, torch.ops.aten._local_scalar_dense.default
    _AT_ONCE.append(DTensor)
    handlers[operator] = _number_of

    def undo() -> None:
        _AT_ONCE.pop()
        if not _AT_ONCE and handlers.get(operator) is _number_of:
            del handlers[operator]

    return undo


def _number_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not all(placement.is_replicate() for placement in args[0].placements):
        raise Refused(
            "reading a number of sharded parameters or gradients",
            found="a DTensor holds this process's part of it: a norm by hand, or an optimizer that takes one",
            next_move="call full_tensor() first, on all processes; clip by torch.nn.utils.clip_grad_norm_; or pass "
            "shard='optimizer'",
        )
    return operator(args[0].to_local())


class GradientElsewhere(torch.Tensor):
    """Stands for the gradient of a parameter that was replaced. It raises Refused when it is used."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> GradientElsewhere:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Refused(
            "using the gradient of a parameter",
            found="the model's parameters were replaced by shards at memfit.wrap, and this one was listed before",
            next_move="list model.parameters() after memfit.wrap",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "<the gradient of a parameter that was replaced by a shard>"


def forget_gradients(replaced: Iterable[torch.Tensor]) -> None:
    """Let the gradients of these parameters, which others have replaced, raise Refused when they are used."""
    for parameter in replaced:
        parameter.grad = GradientElsewhere(parameter) if parameter.requires_grad else None
