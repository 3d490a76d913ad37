"""Plain PyTorch, the reference of every comparison: whole-batch gradients, accumulation by hand, training.

Random draws (dropout) come from the global generators as in any script: seed before each of two runs to be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from zoo.family import Family

Loss = Callable[[nn.Module, Any], Tensor]
Gradients = dict[str, Tensor | None]


def whole_batch_gradients(family: Family, model: nn.Module, batch: Any, loss: Loss | None = None) -> Gradients:
    """The gradients of one backward over the whole batch; `loss` is the family's unless given.

    Taken on a copy: the model's gradients and buffers stay as they were.
    """
    copied = _without_gradients(model)
    (loss or family.loss)(copied, batch).backward()
    return gradients_of(copied)


def accumulated_gradients(
    family: Family,
    model: nn.Module,
    batch: Any,
    sizes: Sequence[int],
    loss: Loss | None = None,
    weight: Callable[[Any, Any], float] | None = None,
) -> Gradients:
    """The same by gradient accumulation as a careful person writes it; `weight(part, whole)` goes with `loss`."""
    copied = _without_gradients(model)
    for part in parts(batch, sizes):
        share = weight(part, batch) if weight else family.count(part) / family.count(batch)
        # A part with nothing to count has loss 0 / 0, and 0 * NaN is NaN.
        if share > 0:
            ((loss or family.loss)(copied, part) * share).backward()
    return gradients_of(copied)


def gradients_of(model: nn.Module) -> Gradients:
    """Copies of the gradients by parameter name, None where no backward arrived."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def relative_error(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> float:
    """The relative L2 error over all parameters concatenated; None has to meet None.

    One by one would mislead: a gradient that is zero but for rounding has any relative error.
    """
    assert got.keys() == want.keys(), f"parameters on one side only: {sorted(got.keys() ^ want.keys())}"
    difference = size = 0.0
    for name, wanted in want.items():
        found = got[name]
        assert (found is None) == (wanted is None), f"{name}: got {_kind(found)}, want {_kind(wanted)}"
        if found is not None and wanted is not None:
            assert found.shape == wanted.shape, f"{name}: got shape {tuple(found.shape)}, want {tuple(wanted.shape)}"
            difference += float((found.detach().double() - wanted.detach().double()).square().sum())
            size += float(wanted.detach().double().square().sum())
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return (difference / size) ** 0.5


def parts(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The batch cut along dimension 0 into parts of these many samples."""
    if isinstance(batch, dict):
        cut = [parts(value, sizes) for value in batch.values()]
        return [dict(zip(batch, values)) for values in zip(*cut)]
    if isinstance(batch, list | tuple):
        return [type(batch)(values) for values in zip(*(parts(value, sizes) for value in batch))]
    return list(batch.split(list(sizes)))


def optimizer_and_schedule(model: nn.Module, lr: float = 1e-3) -> tuple[AdamW, LinearLR]:
    """AdamW over what trains, its rate falling to a tenth over 100 steps."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)
    return optimizer, LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=100)


def train_plain(
    model: nn.Module, batches: Iterable[Any], loss: Loss, *, lr: float = 1e-3, clip: float = 1.0
) -> list[float]:
    """Trains the model in place, one AdamW step with clipping and schedule per batch; the losses on the way."""
    optimizer, scheduler = optimizer_and_schedule(model, lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses


def _without_gradients(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    copied.zero_grad(set_to_none=True)
    return copied


def _kind(gradient: Tensor | None) -> str:
    return "None" if gradient is None else "a gradient"
