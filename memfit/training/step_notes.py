"""Notes of what the user may not expect of a step: losses that are not finite, parameters without gradient, other sizes."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.runtime.core import Core
from memfit.runtime.loss_watch import LossWatch

NAMED = 8
"""Number of parameters named in a note."""


class LossNotes:
    """Notes the losses of steps that were infinite or NaN, some steps later."""

    def __init__(self, core: Core) -> None:
        self._core, self._losses = core, LossWatch(core.device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the detached loss of the latest step."""
        for step, number in self._losses.not_finite():
            self._core.note("note", f"the loss of step {step} was {number}")
        self._losses.add(self._core.steps, loss)


def name_unreached(core: Core, model: nn.Module, optimizer: Optimizer) -> None:
    """Note the parameters without gradient in the first step, which torch silently leaves unchanged."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None and id(p) in trained]
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        core.note("note", f"no gradient reached {', '.join(names[:NAMED])}{more} in the first step")


def compare_with_target(core: Core, samples: int) -> None:
    """Note if a step took another number of samples than was asked for, where the script fetches its batches itself."""
    target = core.settings.share
    if target is not None and samples not in (0, target):
        core.note("note", f"asked for {target} samples per step; this script runs {samples}")
