"""Seconds of work, as the device counts them, without waiting for it: the host's clock on the CPU, else events in its stream.

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
"""Steps whose seconds are remembered."""
PENDING = 64
"""Steps whose events may be waited for."""


class Clock:
    """Points in the time of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def now(self) -> Any:
        """This moment; None on a device that cannot tell."""
        if self._module is None:
            return time.perf_counter()
        if not (hasattr(self._module, "Event") and hasattr(self._module, "current_stream")):
            return None
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))  # (another device may be the current one)
        return event

    def reached(self, moment: Any) -> bool:
        """Whether the device has come so far; False where it cannot tell."""
        return moment is not None and (self._module is None or moment.query())

    def between(self, start: Any, stop: Any) -> float | None:
        """Seconds; None where the device has not come so far yet."""
        if start is None or stop is None:
            return None
        if self._module is None:
            return stop - start
        return start.elapsed_time(stop) / 1e3 if stop.query() else None


class Laps:
    """How long one kind of work took in each of the latest steps; a step may do it several times."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[tuple[Any, Any]] = []
        self._pending: deque[tuple[float, list[tuple[Any, Any]]]] = deque(maxlen=PENDING)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._since: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the work is done."""
        before, self._since = self._since, self._clock.now()
        try:
            yield  # what fails is not timed
            self._open.append((self._since, self._clock.now()))
        finally:
            self._since = before

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside, what is under way is not done."""
        under_way = self._since is not None
        if under_way:
            self._open.append((self._since, self._clock.now()))
        yield
        if under_way:
            self._since = self._clock.now()

    def ends(self, samples: float = 0.0) -> None:
        """A step has done this work, on so many samples."""
        self._pending.append((samples, self._open))
        self._open = []

    def read(self) -> tuple[float, float]:
        """(samples, seconds) of the steps that the device has finished since this was last asked."""
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
        """The steps to come do other work."""
        self._pending.clear()
        self._seconds.clear()

    def typical(self) -> float | None:
        """Seconds per step, the median of the latest; None where none was timed."""
        return median(self._seconds) if self._seconds else None
