"""Which blocks to checkpoint: the least recomputation for which every moment of the step fits.

A mixed-integer linear program over the traced timeline, solved by SciPy's HiGHS: x_b = 1 if block b is checkpointed;
minimise the seconds of recomputation; at every moment what is alive, less what is dropped then, stays within the room, and
so does every recomputation while it happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from memfit.planning.compose import Recompute
from memfit.profiling.timeline import Timeline


def choose_blocks(
    timeline: Timeline,
    recomputes: Sequence[Recompute],
    samples: int,
    room: float,
    seconds: Mapping[str, float],
) -> tuple[str, ...] | None:
    """Names of the blocks to checkpoint so that at most `room` bytes of tensors are alive; None if no choice suffices."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    names = list(dict.fromkeys(r.block for r in recomputes))
    rows, limits = _constraints(timeline, recomputes, names, samples, room)
    if not names or not len(rows):
        return () if timeline.peak(samples) <= room else None
    scale = max(room, 1.0)
    cost = np.array([max(seconds.get(name, 0.0), 1e-9) for name in names])
    solved = milp(
        cost / cost.max(),
        constraints=LinearConstraint(np.array(rows) / scale, -np.inf, np.array(limits) / scale),
        integrality=np.ones(len(names)),
        bounds=Bounds(0, 1),
    )
    if solved.x is None:
        return None
    return tuple(name for name, x in zip(names, solved.x) if x > 0.5)


def _constraints(
    timeline: Timeline, recomputes: Sequence[Recompute], names: list[str], samples: int, room: float
) -> tuple[list[np.ndarray], list[float]]:
    """Rows a and limits b of a @ x <= b."""
    curve, sizes = timeline.curve(samples), timeline.sizes(samples)
    saved = np.array([sizes[r.dropped].sum() for r in recomputes])
    column = np.array([names.index(r.block) for r in recomputes])
    start = np.array([r.visit.stop for r in recomputes])
    stop = np.array([r.backward for r in recomputes])
    rows: list[np.ndarray] = []
    limits: list[float] = []

    def row(event: int, level: float, extra: tuple[int, float] | None = None) -> None:
        coefficients = np.zeros(len(names))
        gone = (start <= event) & (event < stop)
        np.add.at(coefficients, column[gone], -saved[gone])
        if extra is not None:
            coefficients[extra[0]] += extra[1]
        rows.append(coefficients)
        limits.append(room - level)

    edges = sorted({0, len(curve), *start.tolist(), *stop.tolist()})
    for low, high in zip(edges, edges[1:]):
        at = low + int(curve[low:high].argmax())
        row(at, float(curve[at]))
    for i, r in enumerate(recomputes):
        before = float(curve[r.visit.start - 1]) if r.visit.start else 0.0
        spike = float(curve[r.visit.start : r.visit.stop].max()) - before
        # While block i is recomputed it is itself no longer dropped: what it saved is part of the spike.
        row(r.backward - 1, float(curve[max(r.backward - 1, 0)]), (int(column[i]), spike))
    return rows, limits
