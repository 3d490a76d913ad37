"""What happened on the way: re-planning, recovery, anything that could not be kept equal."""

from __future__ import annotations

import logging
from dataclasses import dataclass

LOGGER = logging.getLogger("memfit")


@dataclass(frozen=True)
class Event:
    """One thing the user should be able to read about afterwards."""

    step: int
    """Optimizer steps done before it."""
    kind: str
    """plan, replan, out of memory, not equal, note."""
    message: str
    """What happened, in one sentence."""


class Events(list[Event]):
    """The events of a run, also sent to the logger `memfit`."""

    def add(self, step: int, kind: str, message: str) -> None:
        """Record and log one event; the same note is not recorded twice."""
        if kind in ("note", "not equal") and any(e.message == message for e in self):
            return
        self.append(Event(step, kind, message))
        level = logging.WARNING if kind in ("out of memory", "not equal") else logging.INFO
        LOGGER.log(level, "step %d: %s: %s", step, kind, message)
