"""Results of which fake mode does not know what memory they hold: it is more than they show, or follows from values.

Some losses write one value per element into the memory of their result, and then the mean over it into its first place: the
loss, a single number, keeps all of that alive, through backward and for as long as the script keeps it. Connectionist temporal
classification keeps as many values as its longest target asks for. Not covered: other operators whose results' shapes follow
from values.
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
"""Those that do (aten/src/ATen/native/Loss.cpp, cuda/Loss.cu); other losses reduce into memory of their own."""

CTC = (aten._ctc_loss.Tensor, aten._ctc_loss.default)
"""Losses per sample, and for backward a value for every sign of the longest target, the gaps between them and the gaps around
them (aten/src/ATen/native/LossCTC.cpp)."""


def as_held(func: Any, args: Any, out: Any) -> Any:
    """What `func` gave, in as much memory as it holds in a real run."""
    if func in WRITTEN_OVER and out.dim() == 0:
        values = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        out.untyped_storage().resize_(max(1, values) * out.element_size())
    return out


def of_longest(func: Any, args: Any) -> Any:
    """What `func` gives where its shape follows from the lengths of targets, with memory for the longest that there may be:
    as long as what pads them, so that it is the same for every sample. None for other operators, and for targets one after
    the other, whose lengths nothing tells."""
    if func not in CTC:
        return None
    scores, targets, _, lengths = args[:4]
    if isinstance(lengths, torch.Tensor) and targets.dim() < 2:
        return None
    longest = max(lengths, default=0) if targets.dim() < 2 else targets.shape[1]
    time, samples, _ = scores.shape
    return scores.new_empty(samples), scores.new_empty(samples, time, 2 * longest + 1)
