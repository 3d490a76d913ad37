"""Results that hold more memory than they show, which fake mode does not know.

Some losses write one value per element into the memory of their result, and then the mean over it into its first place: the
loss, a single number, keeps all of that alive, through backward and for as long as the script keeps it.
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


def as_held(func: Any, args: Any, out: Any) -> Any:
    """What `func` gave, in as much memory as it holds in a real run."""
    if func in WRITTEN_OVER and out.dim() == 0:
        values = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        out.untyped_storage().resize_(max(1, values) * out.element_size())
    return out
