"""Measures the seconds of one kind of work in each step, without synchronizing with the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from memfit.hardware.clock import PENDING, Clock

REMEMBERED = 50
"""Number of steps whose seconds are kept."""


class Laps:
    """Collects the seconds of one kind of work in each of the latest steps. A step may do it several times."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[tuple[Any, Any]] = []
        self._pending: deque[tuple[float, list[tuple[Any, Any]]]] = deque(maxlen=PENDING)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._since: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times the work done inside."""
        before, self._since = self._since, self._clock.now()
        try:
            yield  # work that fails is not timed
            self._open.append((self._since, self._clock.now()))
        finally:
            self._since = before

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Excludes the code inside from the work being timed."""
        under_way = self._since is not None
        if under_way:
            self._open.append((self._since, self._clock.now()))
        yield
        if under_way:
            self._since = self._clock.now()

    def ends(self, samples: float = 0.0) -> None:
        """Ends a step that has done this work on `samples` samples."""
        self._pending.append((samples, self._open))
        self._open = []

    def read(self) -> tuple[float, float]:
        """Returns (samples, seconds) of the steps that the device has finished since the last call."""
        samples = seconds = 0.0
        while self._pending:
            of, laps = self._pending[0]
            took = [self._clock.between(*lap) for lap in laps]
            if any(each is None for each in took):
                break
            self._pending.popleft()
            if laps:
                self._seconds.append(sum(took))  # type: ignore[arg-type]
                samples, seconds = samples + of, seconds + self._seconds[-1]
        return samples, seconds

    def forget(self) -> None:
        """Discards all measurements, because the next steps do other work."""
        self._pending.clear()
        self._seconds.clear()

    def typical(self) -> float | None:
        """Returns the median seconds of the latest steps, or None if none was timed."""
        return median(self._seconds) if self._seconds else None
