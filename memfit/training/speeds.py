"""How fast the processes of a training are, from what each says of itself, and when it pays to divide the work anew.

Every process hears the same numbers in the same steps, so all come to the same answer without another word. Equal processes
differ by a third for seconds at a time where a machine is shared, so a difference has to last: over stretches of time rather
than steps, in both halves of what was seen, and longer after every change. Not covered: speeds that change for one kind of
batch alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from memfit.planning.balance import balanced, slowest

STRETCH = 0.25
"""Seconds of the slowest process's work that are taken together."""
WORTH, ENOUGH = 1.08, 12
"""How many times faster steps have to become for another division, once so many stretches were seen. (Of two processes, one is
then 17 % slower than the other.)"""
LARGE, SOON = 1.25, 4
"""The same, where few were seen, or sizes of micro-batches are still being measured."""
MOST = 384
"""Stretches that are remembered."""
UNUSUAL = 2
"""Steps that are left out at first: kernels are loaded, buffers made."""
PATIENT = 32
"""How many times as many stretches have to be seen at most, after several changes."""


class Speeds:
    """Seconds per sample of each process, in stretches since the division of the work last changed."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[float, ...]] = deque(maxlen=MOST)
        self._patience = 1
        self._steady = True
        self._begin()

    def heard(self, samples: Sequence[float], seconds: Sequence[float], *, steady: bool) -> bool:
        """What each process says of its latest work; 0 seconds where it cannot say yet. `steady`: the work is done in the way
        it will be done on. Returns whether there is more to go by now."""
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
        """Seconds per sample of each process, where dividing by them instead of into `shares` pays; else None."""
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
        """The work is divided in another way from now on, or could not be."""
        self._stretches.clear()
        self._patience = min(2 * self._patience, PATIENT)
        self._begin()

    def _begin(self) -> None:
        self._samples: list[float] = []
        self._seconds: list[float] = []
        self._skip = UNUSUAL


def _medians(stretches: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(median(each) for each in zip(*stretches))
