"""Memory that runs out once while a script trains, as memfit meets it: in a forward or in a backward of one of its micro-batches."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor, nn

from memfit.engine.planning_scope import is_planning


def runs_out_of_memory(model: nn.Module, place: str, number: int) -> None:
    """Let the `number`-th forward of the model's head that records gradients, or its backward, run out of memory."""
    left = array("i", [number])  # (what planning leaves in a list is put back)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        (given, *_) = args
        if is_planning() or not torch.is_grad_enabled() or not (isinstance(given, Tensor) and given.requires_grad):
            return
        left[0] -= 1
        if left[0] == 0 and place == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if left[0] == 0:
            given.register_hook(_fail)

    model.head.register_forward_pre_hook(before)


def _fail(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
