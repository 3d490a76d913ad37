"""Predicts the seconds of micro-batches of any size from the few sizes that were timed. Pure values; no torch.

Between two timed sizes the prediction is linear. Outside them it follows one line through the nearest three, which starts at or
above zero and never falls. Not covered: sizes at which a device changes its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

NEAREST = 3
"""Number of timings that the line fits: kernels for one sample often differ from those for many."""
EXPECTED, WEIGHT = 0.8, 0.5
"""In a micro-batch of twice the largest timed size, a sample is expected to cost this share of its cost there. The error of
this expectation counts half as much as a timing's. Without it, one disturbed timing of two could predict anything."""


@dataclass(frozen=True)
class Timing:
    """The measurements of one micro-batch size."""

    samples: int
    """Samples in the micro-batch."""
    seconds: float
    """Seconds of forward and backward of one micro-batch."""
    forward: float
    """Seconds of its forward alone."""
    blocks: tuple[tuple[str, float], ...] = ()
    """Forward seconds of each block."""
    growth: int | None = None
    """Peak bytes beyond those the process held before; None where the platform cannot tell."""
    kept: int = 0
    """Bytes of these that remain afterwards: mostly kernels created for micro-batches of this size."""
    told_from: int = 0
    """The size that the seconds per sample come from, where other load is taken to have disturbed this one; 0: its own."""

    def scaled(self, factor: float, samples: int) -> Timing:
        """Returns this timing with all times multiplied by `factor`, for a micro-batch of `samples`."""
        blocks = tuple((name, seconds * factor) for name, seconds in self.blocks)
        return replace(self, samples=samples, seconds=self.seconds * factor, forward=self.forward * factor, blocks=blocks)


def timing_at(timings: Sequence[Timing], samples: int) -> Timing:
    """Predicts the timing of a micro-batch of that size from at least one other; memory is not predicted."""
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
    """Fits (fixed, per sample) seconds, neither negative, to these (samples, seconds) by least squares of relative errors. The
    time expected at twice the largest size is one of the points."""
    most, there = max(points)
    weighed = [*((n, seconds, 1.0) for n, seconds in points), (2 * most, 2 * EXPECTED * there, WEIGHT)]
    rows = [((weight / seconds) ** 2, n, seconds) for n, seconds, weight in weighed]
    whole = sum(w for w, _, _ in rows)
    n_mean, mean = sum(w * n for w, n, _ in rows) / whole, sum(w * seconds for w, _, seconds in rows) / whole
    each = sum(w * (n - n_mean) * (t - mean) for w, n, t in rows) / sum(w * (n - n_mean) ** 2 for w, n, _ in rows)
    if each < 0:
        return mean, 0.0
    if mean < each * n_mean:  # the line through the origin
        return 0.0, sum(w * n * t for w, n, t in rows) / sum(w * n * n for w, n, _ in rows)
    return mean - each * n_mean, each


def never_slower(timings: Sequence[Timing]) -> tuple[Timing, ...]:
    """Returns the timings in ascending size, none slower per sample than a smaller size: on a busy machine, such a slowdown is
    more likely other load than the model. Replaced timings name the smaller size in `told_from`."""
    found: list[Timing] = []
    for timing in timings:
        best = min((*found, timing), key=lambda t: t.seconds / t.samples)
        if best is not timing:
            faster = best.seconds / best.samples * timing.samples / timing.seconds
            timing = replace(timing.scaled(faster, timing.samples), told_from=best.told_from or best.samples)
        found.append(timing)
    return tuple(found)


def measured_sizes(timings: Sequence[Timing]) -> tuple[int, ...]:
    """Returns the sizes whose seconds were measured; the seconds of all others derive from them."""
    return tuple(timing.samples for timing in timings if not timing.told_from)
