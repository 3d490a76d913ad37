"""Steps of plain PyTorch over whole batches, for a run that is off or undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import UsageError
from memfit.capture.workloads import LossFn


class PlainSteps:
    """What `run.step(batch)` does without memfit. Attribute: `done`, the steps so far."""

    def __init__(self) -> None:
        self.done = 0
        self.before_step: Callable[[], Any] | None = None
        self.loss_fn: LossFn | None = None

    def step(self, model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
        """Perform one optimizer step. Return the loss, detached. Raises UsageError without a `loss_fn`."""
        if self.loss_fn is None:
            raise UsageError(
                "run.step(batch)",
                found="this run has no loss_fn, so it does not know what to minimize",
                next_move="pass loss_fn= to memfit.wrap, or call the model in your own loop",
            )
        from memfit.batches.samples import SampleBatch
        from memfit.capture.workloads import moved

        clear_gradients(optimizer)
        whole = batch.collate() if isinstance(batch, SampleBatch) else batch
        loss = self.loss_fn(model, moved(whole, next(model.parameters()).device))
        loss.backward()
        if self.before_step is not None:
            self.before_step()
        optimizer.step()
        self.done += 1
        return loss.detach()


def clear_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of all its parameters to None."""
    optimizer.zero_grad()  # that of a wrapper may take no arguments, and may leave zeros
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
