"""What happened during a run: re-planning, recovery, anything that could not be kept equal."""

from __future__ import annotations

import logging
from dataclasses import dataclass

LOGGER = logging.getLogger("memfit")


@dataclass(frozen=True)
class Event:
    """Something that happened during a run, for the user to read afterwards."""

    step: int
    """Optimizer steps taken before it."""
    kind: str
    """plan, replan, out of memory, not equal, note."""
    message: str
    """What happened, in one sentence."""


class Events(list[Event]):
    """The events of a run, also sent to the logger `memfit`."""

    def add(self, step: int, kind: str, message: str) -> None:
        """Record and log one event. A repeated "note" or "not equal" is dropped."""
        if kind in ("note", "not equal") and any(e.message == message for e in self):
            return
        self.append(Event(step, kind, message))
        level = logging.WARNING if kind in ("out of memory", "not equal") else logging.INFO
        LOGGER.log(level, "step %d: %s: %s", step, kind, message)
