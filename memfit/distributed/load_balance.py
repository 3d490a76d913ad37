"""Load balancing: measures the speed of every rank from what it reports, and finds when another division of the work pays.

All ranks receive the same numbers in the same steps and reach the same result without communication. On a shared machine,
equal ranks differ by a third for seconds at a time. A difference must therefore last: over intervals of time, not steps, in
both halves of the intervals, and longer after every change. Not covered: speeds that change for one kind of batch only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from memfit.planning.balance import balanced, slowest

STRETCH = 0.25
"""Seconds of the slowest rank's work per interval."""
WORTH, ENOUGH = 1.08, 12
"""Minimum speedup of steps for another division, after that many intervals. (Of two ranks, one is then 17 % slower than the
other.)"""
LARGE, SOON = 1.25, 4
"""The same for few intervals, or while micro-batch sizes are still being tuned."""
MOST = 384
"""Maximum number of intervals kept."""
UNUSUAL = 2
"""Warm-up steps that are skipped: kernels are loaded and buffers allocated."""
PATIENT = 32
"""Maximum factor by which earlier changes raise the number of intervals needed."""


class Speeds:
    """Seconds per sample of each rank, per interval since the division of the work last changed."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[float, ...]] = deque(maxlen=MOST)
        self._patience = 1
        self._steady = True
        self._begin()

    def heard(self, samples: Sequence[float], seconds: Sequence[float], *, steady: bool) -> bool:
        """Add what each rank reports of its latest work; 0 seconds if unknown. `steady`: the work runs in its final form.
        Returns whether an interval is complete."""
        self._steady = steady
        if not all(samples) or not all(seconds):
            return False
        self._skip -= 1
        if self._skip >= 0:
            return False
        self._samples = [a + b for a, b in zip(self._samples or [0.0] * len(samples), samples)]
        self._seconds = [a + b for a, b in zip(self._seconds or [0.0] * len(seconds), seconds)]
        if max(self._seconds) < STRETCH:
            return False
        self._stretches.append(tuple(took / of for took, of in zip(self._seconds, self._samples)))
        self._samples, self._seconds = [], []
        return True

    def better(self, shares: Sequence[int]) -> tuple[float, ...] | None:
        """Return the seconds per sample of each rank if dividing by them beats `shares`, else None."""
        enough = self._steady and len(self._stretches) >= ENOUGH * self._patience
        if not enough and len(self._stretches) < SOON * self._patience:
            return None
        seen = list(self._stretches)
        now = _medians(seen)
        wanted = balanced(sum(shares), now, [sum(shares)] * len(shares))
        halves = _medians(seen[: len(seen) // 2]), _medians(seen[len(seen) // 2 :])
        bar = WORTH if enough else LARGE
        pays = all(slowest(shares, half) >= bar * slowest(wanted, half) for half in halves)
        return now if pays else None

    def changed(self) -> None:
        """Start over after a change, or a failed change, of the division."""
        self._stretches.clear()
        self._patience = min(2 * self._patience, PATIENT)
        self._begin()

    def _begin(self) -> None:
        self._samples: list[float] = []
        self._seconds: list[float] = []
        self._skip = UNUSUAL


def _medians(stretches: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(median(each) for each in zip(*stretches))
