"""Which part of an effective batch each process should have, so that all are done at the same time: numbers in, numbers out.

Not covered: what a step costs whatever its share (the optimizer); shares that are worked out anew from what was measured under
the ones before come to the point where that is included.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.batches.pieces import divided
from memfit.planning.plan import Plan

PRECISE = 1 << 30
"""Speeds are compared in so many parts."""


def balanced(samples: int, seconds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """`samples` divided in proportion to speed, no process having more than its `most`; `seconds` are those of a sample, by
    rank. `most` has room for all of them together."""
    fastest = min(seconds)
    speeds = [max(1, round(PRECISE * fastest / each)) for each in seconds]
    full: dict[int, int] = {}
    while True:
        rest = [i for i in range(len(speeds)) if i not in full]
        parts = divided(samples - sum(full.values()), [speeds[i] for i in rest]) if rest else ()
        over = {i: most[i] for i, part in zip(rest, parts) if part > most[i]}
        if not over:
            found = {**full, **dict(zip(rest, parts))}
            return tuple(found[i] for i in range(len(speeds)))
        full |= over


def slowest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds until the last process is done with its share."""
    return max(share * each for share, each in zip(shares, seconds))


def most_samples(plan: Plan, per_sample: int) -> int:
    """The largest share that a process has room for, of which each sample takes `per_sample` bytes beside its micro-batch."""
    smaller = [] if plan.by_size else plan.fitting_with_same_levers()
    least = min((option.cost.upper for option in smaller), default=plan.predicted.upper)
    room = plan.room + max(0, plan.predicted.upper - least)
    return plan.share + max(0, room) // max(1, per_sample)
