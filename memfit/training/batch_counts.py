"""Counts the batches that a run's loader has yielded, and those that no optimizer step covers yet."""

from __future__ import annotations

from collections import deque

from memfit.loading.loader import BatchInfo
from memfit.training.step_clock import HISTORY

Progress = tuple[int, int]
"""Optimizer steps and training calls, which advance once a batch is trained on."""


class BatchCounts:
    """Attributes: `latest` (the loader's current batch), `yielded` (batches so far), `waits` (seconds that the script waited
    for the latest ones)."""

    def __init__(self) -> None:
        self.latest: BatchInfo | None = None
        self.yielded = 0
        self.waits: deque[float] = deque(maxlen=HISTORY)
        self._covered = 0
        self._progress_before: Progress = (0, 0)

    def add(self, info: BatchInfo, progress: Progress) -> None:
        """Count a batch that the loader is about to yield."""
        self.latest = info
        self.waits.append(info.waited)
        self.yielded += 1
        self._progress_before = progress

    def stepped(self) -> None:
        """Note that an optimizer step covers all batches so far."""
        self._covered = self.yielded

    def unfinished(self, progress: Progress, accumulated: int) -> int:
        """Return how many batches no optimizer step covers: the latest if nothing was trained on it, and those that the script
        accumulates, `accumulated` to a step."""
        untouched = int(progress == self._progress_before)
        return untouched + (self.yielded - untouched - self._covered) % accumulated
