"""Measuring micro-batch sizes while training: the first effective batches are cut into several sizes in turn, first far apart,
then near the fastest.

The gradient does not depend on the sizes, so measuring them costs nothing but the few micro-batches that are slower than the
best. Not covered: sizes beyond what the plan's profile says fits, compiled models (each size would be compiled), and replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from memfit.training.laps import Clock

ENOUGH, ENOUGH_WHOLE = 3, 2
"""Measurements of each size in each of the two rounds: by micro-batches, and by whole batches."""
PATIENCE = 60
"""Batches after which what was measured has to do: some sizes never come about where batches are smaller than planned for."""
NEAR = 1.1
"""Sizes within this factor of the fastest are measured again in the second round."""
HOPELESS = 1.5
"""A size this much slower per unit than the best so far is not tried again."""


class Tuner:
    """Proposes how an effective batch is cut, and learns from how long its micro-batches took.

    A choice is a size of micro-batch, in units: samples, or elements where samples differ in size. `fitting` are those that
    fit, `planned` the one in force; `alone` fits only as the one micro-batch of its batch. With `whole`, a batch is cut by one
    choice and measured whole: where samples differ in size, so do its micro-batches, and padding counts as well.
    """

    def __init__(
        self, fitting: Sequence[int], planned: int, device: torch.device, *, alone: int | None = None, whole: bool = False
    ) -> None:
        self.fitting = tuple(sorted({*fitting, planned}))
        self.choices = tuple(sorted({*spread(self.fitting), planned}))
        self.planned, self._alone = planned, alone
        self._once = ENOUGH_WHOLE if whole else ENOUGH
        self._pieces: int | None = None
        self._enough, self._near_known, self._passes = self._once, False, 0
        self._clock = _Clock(device)
        self._measured: dict[int, list[float]] = {choice: [] for choice in self.choices}
        self._running: list[tuple[int, int] | None] = []
        self._turn = 0

    @property
    def largest(self) -> int:
        """The largest choice it may propose."""
        return self.choices[-1]

    @property
    def done(self) -> bool:
        """Whether every choice that is not hopeless was measured often enough, and then those near the fastest again."""
        return len(self.fitting) < 2 or self._passes > PATIENCE or (self._near_known and self._all_measured())

    def next_choice(self, *, beside: bool = False, most: int | None = None) -> int:
        """The choice for the next micro-batch; `beside`: of a batch that has others already; `most`: units in the batch."""
        alone = not beside and (most is None or self._alone is None or most <= self._alone)
        allowed = [c for c in self.choices if c != self._alone or alone]
        missing = [c for c in allowed if self._is_open(c)]
        open_ = missing or ([self.planned] if self.planned in allowed or not allowed else allowed[-1:])
        choice = open_[self._turn % len(open_)]
        self._turn += 1
        return choice

    def begin(self) -> None:
        """A pass begins; what was proposed for one that failed is forgotten."""
        self._collect()
        self._passes += 1
        if not self._near_known and self._all_measured():
            self._look_near()
        self._clock.start()

    def expect(self, choice: int, units: int) -> None:
        """The next micro-batch of the pass is of this choice and has that many units; it counts if it is about full."""
        self._running.append((choice, units) if units >= 0.75 * choice else None)

    def expect_batch(self, choice: int, units: int, pieces: int) -> None:
        """The pass is cut by this choice into that many micro-batches and has that many units."""
        self._running, self._pieces = [(choice, units)], pieces

    def micro_batch_done(self, index: int) -> None:
        """A micro-batch has run."""
        self._clock.mark()

    def best(self) -> tuple[int, dict[int, float]]:
        """(the fastest choice, seconds per unit of every choice measured)."""
        self._collect()
        rates = {c: median(found) for c, found in self._measured.items() if found}
        if not rates:
            return self.planned, {}
        return min(rates, key=lambda choice: rates[choice]), rates

    def _look_near(self) -> None:
        """The second round: sizes between the fastest and those beside it, and those that were about as fast."""
        fastest, rates = self.best()
        measured = sorted(rates)
        at = measured.index(fastest)
        beside = [self._between(a, b) for a, b in itertools.pairwise(measured[max(0, at - 1) : at + 2])]
        near = [choice for choice, rate in rates.items() if rate <= NEAR * rates[fastest]]
        self.choices = tuple(sorted({*near, *(size for size in beside if size is not None)}))
        self._measured = {**{choice: [] for choice in self.choices}, **self._measured}
        self._enough, self._near_known = 2 * self._once, True

    def _between(self, low: int, high: int) -> int | None:
        """The size that fits and lies in the middle of two, by their ratio; None where there is none."""
        inside = [size for size in self.fitting if low < size < high]
        return min(inside, key=lambda size: abs(size * size - low * high), default=None)

    def _all_measured(self) -> bool:
        return all(len(self._measured[c]) >= self._enough for c in self._worth_trying())

    def _worth_trying(self) -> list[int]:
        rates = {c: min(found) for c, found in self._measured.items() if found and c in self.choices}
        fastest = min(rates.values(), default=0.0)
        return [c for c in self.choices if rates.get(c, 0.0) <= fastest * HOPELESS]

    def _is_open(self, choice: int) -> bool:
        return choice in self._worth_trying() and len(self._measured[choice]) + self._pending(choice) < self._enough

    def _pending(self, choice: int) -> int:
        return sum(1 for running in self._running if running is not None and running[0] == choice)

    def _collect(self) -> None:
        seconds = self._clock.read()
        if self._pieces is not None:
            seconds = [sum(seconds)] if len(seconds) == self._pieces else []
        for running, took in zip(self._running, seconds):
            if running is not None:
                self._measured[running[0]].append(took / running[1])
        self._running, self._pieces = [], None


def spread(sizes: Sequence[int], factor: int = 2) -> tuple[int, ...]:
    """Of these sizes (ascending), those next to the smallest, `factor` times it, its square times it, ... and the last."""
    if not sizes:
        return ()
    targets = [sizes[0]]
    while targets[-1] * factor <= sizes[-1]:
        targets.append(targets[-1] * factor)
    return tuple(sorted({min(sizes, key=lambda n: abs(n - target)) for target in targets} | {sizes[-1]}))


class _Clock:
    """Time between marks, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._marks: list[Any] = []

    def start(self) -> None:
        self._marks = []
        self.mark()

    def mark(self) -> None:
        self._marks.append(self._clock.now())

    def read(self) -> list[float]:
        """Seconds between consecutive marks, as far as the device has reached them."""
        marks, self._marks = self._marks, []
        between = (self._clock.between(a, b) for a, b in itertools.pairwise(marks))
        return [seconds for seconds in between if seconds is not None]
