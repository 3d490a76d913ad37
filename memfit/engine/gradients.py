"""Gradients: as torch.autograd.grad returns them, also of sharded parameters and through reentrant checkpoints; scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memfit.engine.handover import Factor
from memfit.engine.known_means import leaves_of, nodes_of
from memfit.engine.modules import modules_of


def gradients_of(loss: torch.Tensor, parameters: Sequence[torch.Tensor], model: nn.Module) -> list[torch.Tensor | None]:
    """Return what `torch.autograd.grad` does, None for unused parameters. Of sharded parameters, returns this rank's shards,
    whose gradients accumulate only in a full `backward`."""
    if is_sharded(model):
        torch.autograd.backward(loss)
        found = [None if p.grad is None else p.grad.to_local() for p in parameters]  # type: ignore[attr-defined]
        set_gradients(parameters, [None] * len(parameters))
        return found
    if _holds_reentrant_checkpoint(loss):
        return _gradients_by_backward(loss, parameters, model)
    return list(torch.autograd.grad(loss, list(parameters), allow_unused=True))


def _holds_reentrant_checkpoint(loss: torch.Tensor) -> bool:
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes_of([loss]))


def _gradients_by_backward(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], model: nn.Module
) -> list[torch.Tensor | None]:
    """For reentrant checkpoints, which `torch.autograd.grad` does not support: they run their own backward into `.grad`."""
    receivers = list({id(t): t for t in (*leaves_of([loss]), *model.parameters(), *parameters)}.values())
    before = [receiver.grad for receiver in receivers]
    set_gradients(receivers, [None] * len(receivers))
    try:
        torch.autograd.backward(loss)
        return [p.grad for p in parameters]
    finally:
        set_gradients(receivers, before)

AS_GIVEN = "_memfit_as_given"
"""Attribute of a sharded model: returns a context in which its modules are unsharded, as the user gave them."""
RESHARD = "_memfit_let_go"
"""Attribute of a sharded model: frees the all-gathered parameters (reshard)."""


def reshard_model(model: nn.Module) -> None:
    """Reshard the model if its parameters are sharded."""
    model.__dict__.get(RESHARD, lambda: None)()


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's parameters are sharded (FSDP2)."""
    return bool(getattr(model, "_is_fsdp_managed_module", False))


def bytes_here(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor on this rank: those of the local shard if it is sharded."""
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]
    return held.numel() * held.element_size()


def set_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Set the `.grad` of each parameter."""
    for p, grad in zip(parameters, gradients):
        p.grad = grad


def sparse_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters with sparse gradients, which hold only the rows that a batch uses."""
    return [p for module in modules_of(model) if is_sparse(module) for p in module.parameters(recurse=False)]


def is_sparse(module: nn.Module) -> bool:
    """Whether a module has sparse gradients."""
    return module.__dict__.get("sparse") is True


def scaled(gradient: torch.Tensor | None, factor: Factor) -> torch.Tensor | None:
    """Return a gradient times `factor`, in place if it is dense."""
    if gradient is None or (isinstance(factor, float) and factor == 1.0):
        return gradient
    return gradient * factor if gradient.is_sparse else gradient.mul_(factor)


def scaled_part(gradient: torch.Tensor | None, factor: Factor) -> torch.Tensor | None:
    """Multiply this rank's part of a sharded gradient by `factor`, in place."""
    if gradient is not None:
        gradient.to_local().mul_(factor)  # type: ignore[attr-defined]
    return gradient


def product(one: Factor, other: Factor) -> Factor:
    """Return the product of two factors. Nothing is computed for 1.0 times another."""
    return other if isinstance(one, float) and one == 1.0 else one * other
