"""What an effective batch has to compute, as accumulation sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from memfit._errors import UsageError
from memfit.batches.weights import Count
from memfit.engine.compose_state import Composition
from memfit.engine.weighting import CountOf


class Work(Protocol):
    """Computes one micro-batch of an effective batch. Implemented by step mode, script mode and profiling samples."""

    samples: int
    """Samples in the effective batch."""
    device: torch.device
    """Device of the model."""
    composition: Composition
    """How side effects of the forwards are composed across micro-batches."""

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        """Cut or collate the samples `start:stop` on the device; with `count`, also return their count."""
        ...

    def counted(self, start: int, stop: int, count: CountOf) -> Count | None:
        """Count the samples `start:stop` if they are on an accelerator already; else return None."""
        ...

    def forward(self, inputs: Any) -> Any:
        """Return what the loss is computed from: the model's output, or the inputs if `loss` runs the model."""
        ...

    def loss(self, outputs: Any) -> torch.Tensor:
        """Compute the loss with the script's own arithmetic and autocast. Means of known losses are looked for in here."""
        ...

    def extra_receivers(self) -> Sequence[torch.Tensor]:
        """Differentiable tensors besides parameters that receive gradients (inputs that require them)."""
        ...

    def extra_gradients(self) -> list[torch.Tensor | None]:
        """Move out the gradients that the extra receivers got, in the same order."""
        ...


def loss_of(work: Work, samples: int) -> torch.Tensor:
    """Compute the loss of a work's first `samples` samples."""
    inputs, _ = work.inputs(0, samples, None)
    return checked_loss(work.loss(work.forward(inputs)))


def checked_loss(loss: Any) -> torch.Tensor:
    """Return `loss` as a scalar with a graph. Raises UsageError that says what it is otherwise."""
    if not isinstance(loss, torch.Tensor):
        raise _not_a_loss(
            f"it is of type {type(loss).__name__}", "return a tensor of one element that depends on the model"
        )
    if loss.numel() != 1:
        raise _not_a_loss(f"its shape is {tuple(loss.shape)}", "reduce it to one number, for example with .mean()")
    if not loss.requires_grad:
        raise _not_a_loss(
            "it does not depend on any parameter that requires a gradient",
            "compute it from the model's output without .detach(), .item() or torch.no_grad()",
        )
    if loss.is_complex():
        raise _not_a_loss(f"it is a complex number ({loss.dtype})", "return a real one, for example its .abs() or .real")
    return loss if loss.dim() == 0 else loss.reshape(())


def _not_a_loss(found: str, next_move: str) -> UsageError:
    return UsageError("a loss to run backward from", found=found, next_move=next_move)
