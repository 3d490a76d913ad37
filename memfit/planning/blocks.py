"""Which blocks to checkpoint: the least recomputation for which every moment of the step fits.

A mixed-integer linear program over the traced timeline, solved by SciPy's HiGHS: x_b = 1 if block b is checkpointed;
minimise the seconds of recomputation; at every moment what is alive, less what is dropped then, plus the inputs that are
held longer, stays within the room, and so does every recomputation while it happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memfit.planning.compose import Recompute
from memfit.profiling.timeline import Timeline


def choose_blocks(
    timeline: Timeline,
    recomputes: Sequence[Recompute],
    samples: int,
    room: float,
    seconds: Mapping[str, float],
    *,
    accumulates: bool = True,
) -> tuple[str, ...] | None:
    """Names of the blocks to checkpoint so that at most `room` bytes of tensors are alive; None if no choice suffices.

    `accumulates=False`: with a single micro-batch, during which gradients are only being born.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    names = list(dict.fromkeys(r.block for r in recomputes))
    if not names:
        return () if timeline.peak(samples, accumulates=accumulates) <= room else None
    program = _Program(timeline, recomputes, names, samples)
    rows, limits = program.memory(room, accumulates)
    rows += program.implied
    limits += [0.0] * len(program.implied)
    cost = np.zeros(program.columns)
    cost[: len(names)] = [max(seconds.get(name, 0.0), 1e-9) for name in names]
    solved = milp(
        cost / cost.max(),
        constraints=LinearConstraint(np.array([program.dense(row) for row in rows]), -np.inf, np.array(limits)),  # pyright: ignore[reportArgumentType]
        integrality=(cost > 0).astype(int),
        bounds=Bounds(0, 1),
    )
    if solved.x is None:
        return None
    return tuple(name for name, x in zip(names, solved.x) if x > 0.5)


class _Change(NamedTuple):
    """What a variable adds to the bytes alive after each event from `start` up to `stop`."""

    column: int
    start: int
    stop: int
    size: float


Row = list[tuple[int, float]]
"""(column, coefficient) of one constraint; a column may occur more than once."""


class _Program:
    """The constraints of the program. The first columns are the blocks, the others say whether an input that several
    blocks would hold is held during some stretch."""

    def __init__(self, timeline: Timeline, recomputes: Sequence[Recompute], names: list[str], samples: int) -> None:
        self._timeline, self._samples = timeline, samples
        self._sizes = timeline.sizes(samples)
        self._recomputes = [(names.index(r.block), r) for r in recomputes]
        self.columns = len(names)
        self.implied: list[Row] = []
        """Rows that have to be at most 0: a stretch is held if a block that needs it is checkpointed."""
        self._dropped = [
            _Change(column, r.visit.stop, r.backward, -self._sizes[r.dropped].sum()) for column, r in self._recomputes
        ]
        self._held = [change for index in {i: None for r in recomputes for i in r.held} for change in self._hold(index)]

    def dense(self, row: Row) -> np.ndarray:
        """A row with all its coefficients."""
        coefficients = np.zeros(self.columns)
        for column, value in row:
            coefficients[column] += value
        return coefficients

    def memory(self, room: float, accumulates: bool) -> tuple[list[Row], list[float]]:
        """Rows a and limits b of a @ x <= b, in units of `room`: at every moment what is alive fits."""
        scale = max(room, 1.0)
        curve = self._timeline.curve(self._samples, accumulates=accumulates)
        moments = [*self._stretches(curve), *self._recomputations(curve, accumulates)]
        rows = [[(column, size / scale) for column, size in row] for _, row in moments]
        return rows, [(room - level) / scale for level, _ in moments]

    def _stretches(self, curve: np.ndarray) -> list[tuple[float, Row]]:
        """(bytes alive, changes) at the highest event of each stretch in which the changes are the same."""
        changes = [*self._dropped, *self._held]
        edges = sorted({0, len(curve), *(c.start for c in changes), *(c.stop for c in changes)})
        highest = [low + int(curve[low:high].argmax()) for low, high in itertools.pairwise(edges)]
        return [(float(curve[at]), [(c.column, c.size) for c in changes if c.start <= at < c.stop]) for at in highest]

    def _recomputations(self, curve: np.ndarray, accumulates: bool) -> list[tuple[float, Row]]:
        """The same while each block is computed again, just before its backward."""
        window = self._timeline.window
        found = []
        for column, r in self._recomputes:
            if not accumulates and len(window) > 1 and r.visit.start >= window[1]:
                continue
            before = r.backward - 1
            row = [(c.column, c.size) for c in self._dropped if c.start <= before < c.stop]
            row += [(c.column, c.size) for c in self._held if c.start <= before and r.backward < c.stop]
            row.append((column, r.peak(self._sizes) - float(self._sizes[r.returned].sum())))
            found.append((float(curve[before]), row))
        return found

    def _hold(self, index: int) -> list[_Change]:
        """The stretches for which an input may be held beyond its death, each up to the end of some block's backward."""
        until: dict[int, list[int]] = {}
        for column, r in self._recomputes:
            if index in r.held:
                until.setdefault(r.end, []).append(column)
        start = int(self._timeline.lifetimes()[1][index])
        changes = []
        later: int | None = None
        for end, columns in sorted(until.items(), reverse=True):
            needed = [*columns, *([] if later is None else [later])]
            later = needed[0] if len(needed) == 1 else self._any_of(needed)
            changes.append((later, end))
        starts = [end for _, end in changes[1:]] + [start]
        return [_Change(column, begin, end, self._sizes[index]) for (column, end), begin in zip(changes, starts)]

    def _any_of(self, columns: list[int]) -> int:
        """A new column that is at least each of `columns`."""
        self.columns += 1
        self.implied += [[(column, 1.0), (self.columns - 1, -1.0)] for column in columns]
        return self.columns - 1
