"""Detects a non-finite loss some steps later, without synchronizing with the device."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from memfit.engine.async_reads import AsyncReads


class LossWatch:
    """Holds the losses of the latest steps while they are copied to the host."""

    def __init__(self, device: torch.device) -> None:
        self._reads: AsyncReads[int] = AsyncReads(device)

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Add the loss of a step, detached."""
        self._reads.add(step, loss)

    def not_finite(self) -> Iterator[tuple[int, float]]:
        """Yield (step, loss) for losses that arrived since the last call and are infinite or NaN."""
        for step, loss in self._reads.arrived():
            number = float(loss.float().numpy())
            if not math.isfinite(number):
                yield step, number
