"""Load balancing: splits an effective batch among ranks of different speed so that all finish together. Pure functions.

Not covered: the part of a step that does not depend on the share (the optimizer). Shares that are recomputed from times
measured under the previous shares converge to values that include it.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.batches.pieces import divided
from memfit.planning.plan import Plan

PRECISE = 1 << 30
"""Resolution of relative speeds: the fastest rank's integer weight."""


def balanced(samples: int, seconds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Split `samples` among ranks in proportion to their speed, with at most `most` samples on each. `seconds` are seconds per
    sample, by rank. The sum of `most` must be at least `samples`."""
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
    """Return the seconds until the last rank finishes its share."""
    return max(share * each for share, each in zip(shares, seconds))


def most_samples(plan: Plan, per_sample: int) -> int:
    """Return the largest share that fits on a rank, at `per_sample` bytes per sample beside the micro-batch's own memory."""
    smaller = [] if plan.by_size else plan.fitting_with_same_levers()
    least = min((option.cost.upper for option in smaller), default=plan.predicted.upper)
    room = plan.room + max(0, plan.predicted.upper - least)
    return plan.share + max(0, room) // max(1, per_sample)
