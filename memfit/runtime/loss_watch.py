"""Detects a non-finite loss some steps later, without synchronizing with the device.

Not covered: devices without events, which cannot tell whether a number has arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from memfit.autotune.timer import PENDING, Clock


class LossWatch:
    """Holds the losses of the latest steps while they are copied to the host."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque(maxlen=PENDING)

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Add the loss of a step, detached."""
        # The copy goes to pinned memory, where the host may read stale values until the event is reached.
        self._pending.append((step, loss.to("cpu", non_blocking=True), self._clock.now()))

    def not_finite(self) -> Iterator[tuple[int, float]]:
        """Yield (step, loss) for losses that arrived since the last call and are infinite or NaN."""
        while self._pending and self._clock.reached(self._pending[0][2]):
            step, loss, _ = self._pending.popleft()
            number = float(loss.float().numpy())
            if not math.isfinite(number):
                yield step, number
