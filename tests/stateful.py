"""Trains models whose forward moves state, plain and with memfit, in every way in which micro-batches run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD

import memfit

MODES = ("loss", "accumulated", "replayed")
"""Step mode, and script mode in one and in two passes."""
MICRO_BATCH = 3


def mean_square(out: Tensor, batch: Any) -> Tensor:
    """The mean of the squares of the outputs, which is the loss unless another is given."""
    return out.pow(2).mean()


def trained(
    model: nn.Module,
    batches: Sequence[Any],
    mode: str,
    look: Callable[[Any], Any],
    *,
    wrapped: bool,
    loss: Callable[[Tensor, Any], Tensor] = mean_square,
) -> tuple[list[Any], dict[str, Tensor]]:
    """Returns (what `look(model)` gives after each batch, the parameters)."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch)
        return loss(out.flip(0).flip(0) if mode == "replayed" else out, batch)

    optimizer, seen = SGD(model.parameters(), 0.1), list[Any]()
    step_mode = wrapped and mode == "loss"
    made = memfit.wrap(model, optimizer, micro_batch=MICRO_BATCH, loss_fn=loss_fn if step_mode else None) if wrapped else None
    for batch in batches:
        if made is not None and step_mode:
            made.step(batch)
        else:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        seen.append(copy.deepcopy(look(model)))
    return seen, {name: parameter.detach() for name, parameter in model.named_parameters()}
