"""Decides whether overlapping gradient reduction with the last micro-batch pays: times both in turn, then keeps the faster.

It takes and returns values only, so every rank gets the same numbers and decides the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from memfit.hardware.clock import PENDING, Clock

TRIED = 8
"""Timed steps per way."""
GAIN = 0.01
"""Fraction of a step that must be saved."""


class Trials:
    """Chooses by timing steps with and without overlap: `chosen` (whether it pays; None while undecided), `gain` (fraction of a
    step that it saves)."""

    def __init__(self, clock: Clock) -> None:
        self.chosen: bool | None = None
        self.gain = 0.0
        self._clock = clock
        self._turn = False
        self._pending: deque[tuple[bool, Any, Any]] = deque(maxlen=PENDING)
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def next_way(self) -> bool:
        """Whether to overlap in the next step that can."""
        if self.chosen is None:
            self._turn = not self._turn
            return self._turn
        return self.chosen

    def ran(self, beside: bool, start: Any, stop: Any) -> None:
        """Records the start and the end of a step on the device."""
        if self.chosen is None:
            self._pending.append((beside, start, stop))

    def stated(self) -> tuple[float, float]:
        """Returns this rank's median seconds per step with and without overlap; zeros until enough of both are known."""
        while self._pending:
            beside, start, stop = self._pending[0]
            took = self._clock.between(start, stop)
            if took is None:
                break
            self._pending.popleft()
            self._seconds[beside].append(took)
        if self.chosen is not None or min(map(len, self._seconds.values())) < TRIED:
            return 0.0, 0.0
        return median(self._seconds[True]), median(self._seconds[False])

    def heard(self, paces: Sequence[tuple[float, float]]) -> None:
        """Takes what all ranks stated, and decides once all know."""
        if self.chosen is not None or not all(beside and after for beside, after in paces):
            return
        beside, after = (max(seconds) for seconds in zip(*paces))
        self.gain = 1.0 - beside / after
        self.chosen = self.gain >= GAIN
        self._pending.clear()
