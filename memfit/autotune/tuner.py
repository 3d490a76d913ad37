"""Tunes the micro-batch size during training: cuts the first effective batches into several sizes, then sizes near the fastest.

Gradients do not depend on the sizes, so measuring costs only the few micro-batches that are slower than the best. Not covered:
sizes that do not fit by the plan's profile, compiled models (each size would be compiled), and replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from memfit.hardware.clock import Clock

ENOUGH, ENOUGH_WHOLE = 3, 2
"""Measurements per size in each of the two rounds: by micro-batch, and by whole batch."""
PATIENCE = 60
"""Number of batches after which tuning ends. Some sizes never occur if batches are smaller than planned for."""
NEAR = 1.1
"""The second round measures sizes within this factor of the fastest again."""
HOPELESS = 1.5
"""A size this much slower per unit than the best is not tried again."""


class Tuner:
    """Proposes how to cut an effective batch, and learns from the seconds of its micro-batches.

    A choice is a micro-batch size in units: samples, or elements if samples differ in size. `fitting` are the sizes that fit,
    `planned` is in force, `alone` fits only as its batch's single micro-batch. With `whole`, a batch is cut by one choice and
    measured whole, because samples, and thus micro-batches, differ in size and padding counts too.
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
        self._clock = _MarkClock(device)
        self._measured: dict[int, list[float]] = {choice: [] for choice in self.choices}
        self._running: list[tuple[int, int] | None] = []
        self._turn = 0
        self._row = _Row(used=device.type == "cuda")
        self._firsts: set[int] = set()
        """Indices of the pass's micro-batches that begin a row."""

    @property
    def largest(self) -> int:
        """The largest choice that may be proposed."""
        return self.choices[-1]

    @property
    def done(self) -> bool:
        """Whether every promising choice was measured often enough, and those near the fastest again."""
        return len(self.fitting) < 2 or self._passes > PATIENCE or (self._near_known and self._all_measured())

    def next_choice(self, *, beside: bool = False, most: int | None = None) -> int:
        """Returns the choice for the next micro-batch. `beside`: the batch has others already; `most`: units in the batch."""
        alone = not beside and (most is None or self._alone is None or most <= self._alone)
        allowed = [c for c in self.choices if c != self._alone or alone]
        missing = [c for c in allowed if self._is_open(c)]
        open_ = missing or ([self.planned] if self.planned in allowed or not allowed else allowed[-1:])
        choice = self._row.going_on(open_, self._enough + 2)
        if choice is None:
            choice = open_[self._turn % len(open_)]
            self._turn += 1
        self._row.proposes(choice)
        return choice

    def begin(self) -> None:
        """Starts a pass. Proposals for a failed pass are dropped."""
        self._collect()
        self._passes += 1
        self._firsts = set()
        if not self._near_known and self._all_measured():
            self._look_near()
        self._clock.start()

    def expect(self, choice: int, units: int) -> None:
        """Sets the next micro-batch's choice and units. It is measured if it is at least three quarters full."""
        first = self._row.begins(choice)
        if first:
            self._firsts.add(len(self._running))
        self._running.append((choice, units) if units >= 0.75 * choice and not first else None)

    def expect_batch(self, choice: int, units: int, pieces: int) -> None:
        """Sets the choice, units and number of micro-batches for the whole pass."""
        first = self._row.begins(choice)
        self._firsts = {0} if first else set()
        self._running, self._pieces = [None if first else (choice, units)], pieces

    def changes_before(self, index: int) -> bool:
        """Whether the pass's micro-batch of this index is the first of another size, on a device whose allocator keeps segments
        of the sizes before."""
        return index in self._firsts

    def micro_batch_done(self, index: int) -> None:
        """Marks the end of a micro-batch."""
        self._clock.mark()

    def best(self) -> tuple[int, dict[int, float]]:
        """Returns (the fastest choice, seconds per unit of every measured choice)."""
        self._collect()
        rates = {c: median(found) for c, found in self._measured.items() if found}
        if not rates:
            return self.planned, {}
        return min(rates, key=lambda choice: rates[choice]), rates

    def _look_near(self) -> None:
        """Start the second round: sizes about as fast as the fastest, and those between it and its neighbours."""
        fastest, rates = self.best()
        measured = sorted(rates)
        at = measured.index(fastest)
        beside = [self._between(a, b) for a, b in itertools.pairwise(measured[max(0, at - 1) : at + 2])]
        near = [choice for choice, rate in rates.items() if rate <= NEAR * rates[fastest]]
        self.choices = tuple(sorted({*near, *(size for size in beside if size is not None)}))
        self._measured = {**{choice: [] for choice in self.choices}, **self._measured}
        self._enough, self._near_known = 2 * self._once, True

    def _between(self, low: int, high: int) -> int | None:
        """Return the fitting size closest to the geometric mean of two, or None."""
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


class _Row:
    """One choice several times in a row, where the allocator keeps segments for each size: the first time it has none yet, so
    that time does not count."""

    def __init__(self, *, used: bool) -> None:
        self._used, self._choice, self._proposed = used, -1, 0

    def going_on(self, choices: Sequence[int], most: int) -> int | None:
        """Return the row's choice if it is open and was not proposed too often: batches may be too small to measure it."""
        return self._choice if self._used and self._choice in choices and self._proposed < most else None

    def proposes(self, choice: int) -> None:
        """Count a proposal."""
        self._proposed = self._proposed + 1 if choice == self._choice else 1

    def begins(self, choice: int) -> bool:
        """Set what runs next. Return whether it begins a row."""
        before, self._choice = self._choice, choice
        return self._used and choice != before


def spread(sizes: Sequence[int], factor: int = 2) -> tuple[int, ...]:
    """Returns the sizes (ascending) nearest to the smallest times 1, `factor`, `factor`**2, ..., and the last."""
    if not sizes:
        return ()
    targets = [sizes[0]]
    while targets[-1] * factor <= sizes[-1]:
        targets.append(targets[-1] * factor)
    return tuple(sorted({min(sizes, key=lambda n: abs(n - target)) for target in targets} | {sizes[-1]}))


class _MarkClock:
    """Measures the time between marks without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._marks: list[Any] = []

    def start(self) -> None:
        self._marks = []
        self.mark()

    def mark(self) -> None:
        self._marks.append(self._clock.now())

    def read(self) -> list[float]:
        """Return the seconds between consecutive marks that the device has reached."""
        marks, self._marks = self._marks, []
        between = (self._clock.between(a, b) for a, b in itertools.pairwise(marks))
        return [seconds for seconds in between if seconds is not None]
