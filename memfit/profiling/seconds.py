"""Seconds of micro-batches of any size, from those of the few sizes that were timed. Pure values; no torch.

Between timed sizes a straight line connects the two; outside them the seconds follow one line through the nearest three, which
starts at or above nothing and never falls. Not covered: sizes at which a device changes its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

NEAREST = 3
"""Timings that the line goes through: kernels for one sample are often others than those for many."""
EXPECTED, WEIGHT = 0.8, 0.5
"""In a micro-batch of twice the largest size that was timed, a sample is expected to cost this share of what it cost there. Its
error counts half as much as a timing's: two timings, one of them disturbed, would otherwise promise anything."""


@dataclass(frozen=True)
class Timing:
    """One size of micro-batch, as measured."""

    samples: int
    """Samples in the micro-batch."""
    seconds: float
    """Forward and backward of one micro-batch."""
    forward: float
    """Its forward alone."""
    blocks: tuple[tuple[str, float], ...] = ()
    """Forward seconds of each block."""
    growth: int | None = None
    """Bytes the process came to hold beyond what it held before; None where the platform cannot tell."""
    kept: int = 0
    """Bytes of these that stayed: kernels made for micro-batches of this size, mostly."""
    told_from: int = 0
    """The size whose seconds per sample these are, where other work was taken to have disturbed its own; 0: none."""

    def scaled(self, factor: float, samples: int) -> Timing:
        """The times of this one, each that many times as long, for a micro-batch of `samples`."""
        blocks = tuple((name, seconds * factor) for name, seconds in self.blocks)
        return replace(self, samples=samples, seconds=self.seconds * factor, forward=self.forward * factor, blocks=blocks)


def timing_at(timings: Sequence[Timing], samples: int) -> Timing:
    """The timing of a micro-batch of that size, from at least one other; what it holds is not told."""
    known = sorted(timings, key=lambda t: t.samples)
    above = next((i for i, t in enumerate(known) if t.samples >= samples), None)
    if not above:  # beyond the largest, or not above the smallest
        nearest = known[-NEAREST:] if above is None else known[:NEAREST]
        end = replace(known[-1] if above is None else known[0], growth=None, kept=0)
        fixed, each = line_through([(t.samples, t.seconds) for t in nearest])
        return end.scaled((fixed + each * samples) / (fixed + each * end.samples), samples)
    low, high = known[above - 1], known[above]
    share = (samples - low.samples) / (high.samples - low.samples)
    blocks = {name: seconds + share * (dict(high.blocks).get(name, seconds) - seconds) for name, seconds in low.blocks}
    return Timing(
        samples,
        low.seconds + share * (high.seconds - low.seconds),
        low.forward + share * (high.forward - low.forward),
        tuple(blocks.items()),
    )


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per sample) seconds, neither negative, of the line nearest to these (samples, seconds) by the square of relative
    errors, and to what is expected of twice the largest."""
    most, there = max(points)
    weighed = [*((n, seconds, 1.0) for n, seconds in points), (2 * most, 2 * EXPECTED * there, WEIGHT)]
    rows = [((weight / seconds) ** 2, n, seconds) for n, seconds, weight in weighed]
    whole = sum(w for w, _, _ in rows)
    n_mean, mean = sum(w * n for w, n, _ in rows) / whole, sum(w * seconds for w, _, seconds in rows) / whole
    each = sum(w * (n - n_mean) * (t - mean) for w, n, t in rows) / sum(w * (n - n_mean) ** 2 for w, n, _ in rows)
    if each < 0:
        return mean, 0.0
    if mean < each * n_mean:  # the line through nothing
        return 0.0, sum(w * n * t for w, n, t in rows) / sum(w * n * n for w, n, _ in rows)
    return mean - each * n_mean, each


def never_slower(timings: Sequence[Timing]) -> tuple[Timing, ...]:
    """The timings, in ascending size, with none slower per sample than a smaller size: on a busy machine such a difference is
    sooner other work than the model's. Those that are told from a smaller size say so."""
    found: list[Timing] = []
    for timing in timings:
        best = min((*found, timing), key=lambda t: t.seconds / t.samples)
        if best is not timing:
            faster = best.seconds / best.samples * timing.samples / timing.seconds
            timing = replace(timing.scaled(faster, timing.samples), told_from=best.told_from or best.samples)
        found.append(timing)
    return tuple(found)


def measured_sizes(timings: Sequence[Timing]) -> tuple[int, ...]:
    """The sizes whose seconds are their own: those that all others are told from."""
    return tuple(timing.samples for timing in timings if not timing.told_from)
