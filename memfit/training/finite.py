"""Noticing a loss that is not finite without waiting for the device, some steps later.

Not covered: devices without events, which cannot tell whether a number has arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from memfit.training.laps import PENDING, Clock


class LossWatch:
    """The losses of the latest steps, on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque(maxlen=PENDING)

    def add(self, step: int, loss: torch.Tensor) -> None:
        """The loss of a step, detached."""
        # Into pinned memory, where the host may read what was there before until the event is reached.
        self._pending.append((step, loss.to("cpu", non_blocking=True), self._clock.now()))

    def not_finite(self) -> Iterator[tuple[int, float]]:
        """(step, loss) of those that have arrived since this was last asked, and are infinite or not a number."""
        while self._pending and self._clock.reached(self._pending[0][2]):
            step, loss, _ = self._pending.popleft()
            number = float(loss.float().numpy())
            if not math.isfinite(number):
                yield step, number
