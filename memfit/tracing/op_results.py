"""Corrects results that hold more memory than fake mode shows, or whose shape depends on values.

Some losses write one value per element into the memory of their result, and then the mean into its first element. The scalar
loss keeps the whole buffer alive, through backward and for as long as the script holds it. CTC loss keeps as many values as its
longest target needs. Not covered: other operators whose result shapes depend on values.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

WRITTEN_OVER = frozenset(
    (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
    )
)
"""Losses that do this (aten/src/ATen/native/Loss.cpp, cuda/Loss.cu); other losses reduce into new memory."""

CTC = (aten._ctc_loss.Tensor, aten._ctc_loss.default)
"""Operators of CTC loss. They return a loss per sample and, for backward, a value for every label of the longest target, the
gaps between labels and the gaps around them (aten/src/ATen/native/LossCTC.cpp)."""


def as_held(func: Any, args: Any, out: Any) -> Any:
    """Returns the result of `func`, resized to the memory it holds in a real run."""
    if func in WRITTEN_OVER and out.dim() == 0:
        values = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        out.untyped_storage().resize_(max(1, values) * out.element_size())
    return out


def of_longest(func: Any, args: Any) -> Any:
    """Returns the result of an operator whose shape depends on target lengths, sized for the longest possible target: the
    padded length, the same for every sample. None for other operators, and for concatenated targets of unknown lengths."""
    if func not in CTC:
        return None
    scores, targets, _, lengths = args[:4]
    if isinstance(lengths, torch.Tensor) and targets.dim() < 2:
        return None
    longest = max(lengths, default=0) if targets.dim() < 2 else targets.shape[1]
    time, samples, _ = scores.shape
    return scores.new_empty(samples), scores.new_empty(samples, time, 2 * longest + 1)
