"""Summarizes all ranks in a few lines: the shares, the rank with the least room, and which ranks wait.

Not covered: work outside the micro-batches and the gradient reduction (loading, the script's own work).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit._units import format_bytes, format_seconds
from memfit.reporting.facts import RankFacts
from memfit.reporting.words import percent

if TYPE_CHECKING:
    from memfit.reporting.report import Report

APART = 1.05
"""Ratio of budgets above which they count as different: free memory varies by less on one machine."""
IDLE = 0.15
"""Fraction of the slowest rank's computing seconds; a rank that waits at least this long is mentioned."""


def together(report: Report) -> Iterator[str]:
    """Yield lines on how the work is split among ranks, where memory is short or ran out, and which ranks wait."""
    every = report.every
    shares = [each.plan.share for each in every if each.plan is not None]
    if len(shares) < 2:
        return
    if max(shares) - min(shares) > 1:
        yield f"{' + '.join(f'{share:,}' for share in shares)} samples, by rank"
    nearest, limits = min(every, key=lambda each: each.limit - _most(each)), [each.limit for each in every]
    if max(limits) > APART * min(limits):
        used = f"{format_bytes(_most(nearest))} of {format_bytes(nearest.limit)}"
        yield f"least room on rank {nearest.rank}: {used} {'expected' if nearest.peak is None else 'measured'}"
    for each in every:
        if each.ran_out:
            yield f"memory ran out on rank {each.rank}, {each.ran_out} x"
    yield from _idle(every)


def _idle(every: tuple[RankFacts, ...]) -> Iterator[str]:
    timed = [each for each in every if each.computing is not None and each.exchange is not None]
    if len(timed) < 2:
        return
    slowest = max(timed, key=lambda each: each.computing or 0.0)
    for each in timed:
        waits = (slowest.computing or 0.0) - (each.computing or 0.0)
        share = waits / max(1e-12, slowest.computing or 0.0)
        if share >= IDLE:
            long = f"{format_seconds(waits)} per step, {percent(share)} of what that computes"
            yield f"rank {each.rank} waits for rank {slowest.rank}: {long}"


def _most(each: RankFacts) -> int:
    if each.peak is not None or each.plan is None:
        return each.peak or 0
    return each.plan.predicted.peak + each.plan.held
