"""Law 1's two sides: the gradients that a model leaves after each of several batches, by an ordinary loop and by `run.step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit import Run
from memfit.capture.workloads import moved
from zoo.family import Family, first_batch
from zoo.losses import Variant
from zoo.plain import Gradients, gradients_of

CPU = torch.device("cpu")
BATCHES = (12, 7)
"""Samples of two batches in a row, in micro-batches of at most 5: 4 + 4 + 4 and 4 + 3."""

Loss = Callable[[nn.Module, Any], Tensor]


def built(family: Family, dtype: torch.dtype = torch.float64, device: torch.device = CPU) -> nn.Module:
    """Its model with batch norm's statistics frozen; skips where a package is not here."""
    for package in family.requires:
        pytest.importorskip(package)
    model = family.build(dtype=dtype).to(device)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def batches(family: Family, dtype: torch.dtype = torch.float64, device: torch.device = CPU) -> list[Any]:
    return [moved(first_batch(family, n, dtype=dtype, seed=i), device) for i, n in enumerate(BATCHES)]


def tolerance(family: Family) -> float:
    return 1e-6 if family.name == "t5" else 1e-12  # T5's softmax runs in float32 whatever its parameters are


def script_gradients(model: nn.Module, loss: Loss, batches: list[Any]) -> list[Gradients]:
    """What an ordinary loop leaves after each batch."""
    found = []
    for batch in batches:
        model.zero_grad()
        loss(model, batch).backward()
        found.append(gradients_of(model))
    return found


def step_gradients(run: Run, batches: list[Any]) -> list[Gradients]:
    found = []
    for batch in batches:
        run.step(batch)
        found.append(gradients_of(run.model))
    return found


def of_logits(family: Family, variant: Variant, mode: str) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = family.logits(model, batch)
        if mode == "replay":
            logits.detach().sum()  # whoever reads the output before the loss gets it, and its gradient by replay
        return variant.loss(logits, batch)

    return loss
