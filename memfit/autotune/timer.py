"""Measures the seconds of a stretch of work without synchronizing: device events in its stream (CUDA), or the CPU's clock.

Not covered: devices without events; their work is not timed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

REMEMBERED = 50
"""Number of steps whose seconds are kept."""
PENDING = 64
"""Number of steps whose events may be pending."""


class Clock:
    """Takes timestamps on a device without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def now(self) -> Any:
        """Returns a timestamp: an event, or host seconds on the CPU. None if the device has no events."""
        if self._module is None:
            return time.perf_counter()
        if not (hasattr(self._module, "Event") and hasattr(self._module, "current_stream")):
            return None
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))  # (the current device may be another one)
        return event

    def reached(self, moment: Any) -> bool:
        """Whether the device has reached this timestamp; False if that is not known."""
        return moment is not None and (self._module is None or moment.query())

    def between(self, start: Any, stop: Any) -> float | None:
        """Returns the seconds between two timestamps, or None if the device has not reached `stop` yet."""
        if start is None or stop is None:
            return None
        if self._module is None:
            return stop - start
        return start.elapsed_time(stop) / 1e3 if stop.query() else None


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
