"""Measures the seconds per optimizer step."""

from __future__ import annotations

import time
from collections import deque

HISTORY = 1000
"""Number of steps whose durations are kept."""


class StepClock:
    """Measures the seconds per optimizer step."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.rate: float | None = None
        self.history: deque[float] = deque(maxlen=HISTORY)
        self._begun: float | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._begun = time.perf_counter()

    def end(self, samples: int) -> None:
        """End a step over this many samples, if one has begun."""
        if self._begun is None:
            return
        self.seconds = time.perf_counter() - self._begun
        self.rate = samples / self.seconds if self.seconds and samples else None
        self.history.append(self.seconds)
