"""Measures on one sample how far a lower precision moves the gradient: the price of that lever.

Both runs use the same random draws. Not covered: how the difference accumulates over training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.engine.call_context import without_autocast
from memfit.engine.gradients import gradients_of
from memfit.engine.random_slices import Draws
from memfit.engine.staged import Staging
from memfit.engine.work import Work, checked_loss
from memfit.equivalence.measured_loss import probes_of
from memfit.equivalence.proofs import comparable


def gradient_shift(own: Work, lowered: Work, samples: int, staging: Staging, device: torch.device) -> float:
    """Return the relative L2 difference between the gradients of both works for the first `samples`, without side effects."""
    draws = Draws()
    with comparable(staging.model, device), staging.swapped():
        probes = probes_of(staging.parameters())
        of = partial(_gradients, staging.model, samples=samples, probes=probes)
        want = of(own, drawing=draws.recording)
        got = of(lowered, drawing=lambda: draws.sliced(0, samples, samples))
    squares = sum(float((a - b).pow(2).sum()) for a, b in zip(got, want))
    return (squares / max(sum(float(b.pow(2).sum()) for b in want), 1e-30)) ** 0.5


def _gradients(
    model: nn.Module,
    work: Work,
    *,
    samples: int,
    probes: Sequence[torch.Tensor],
    drawing: Callable[[], AbstractContextManager[Any]],
) -> list[torch.Tensor]:
    inputs, _ = work.inputs(0, samples, None)
    with drawing():
        loss = checked_loss(work.loss(work.forward(inputs)))
    with without_autocast(work.device):
        found = gradients_of(loss, probes, model)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(probes, found)]
