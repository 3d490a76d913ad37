"""Weights micro-batches by the user's `weight=`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memfit._errors import UsageError
from memfit.batches.weights import Count
from memfit.engine.totals import wide
from memfit.engine.weighting import CountOf


def counted_by(weight: Callable[[Any], float], device: torch.device) -> CountOf:
    """The user's `weight=` as a count."""

    def count(piece: Any) -> Count:
        value = weight(piece)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            if value.device.type != "cpu" or type(value) is not torch.Tensor:
                return value.detach().reshape(()).to(device, wide(device))
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise UsageError(
                "weighting micro-batches by weight=",
                found=f"it returned {value!r}",
                next_move="return a number of at least 0: the weight of this part's loss, such as its valid labels",
            )
        return value

    return count
