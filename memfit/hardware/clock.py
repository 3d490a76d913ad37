"""Takes timestamps on a device without synchronizing: events in its stream (CUDA), or the CPU's clock.

Not covered: devices without events; their work is not timed.
"""

from __future__ import annotations

import time
from typing import Any

import torch

PENDING = 64
"""Number of steps whose events may be pending."""


def has_events(device: torch.device) -> bool:
    """Returns whether an accelerator has streams and events."""
    module = torch.get_device_module(device)
    return hasattr(module, "Event") and hasattr(module, "current_stream")


class Clock:
    """Takes timestamps on a device without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._works = self._module is None or has_events(device)

    def now(self) -> Any:
        """Returns a timestamp: an event, or host seconds on the CPU. None if the device has no events."""
        if self._module is None:
            return time.perf_counter()
        if not self._works:
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
