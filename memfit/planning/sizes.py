"""Plans micro-batches for samples of different sizes, from profiles of a short and of the longest sample.

A sample's memory has a linear part in its size (linear layers) and a quadratic one (attention as separate operations). Two
traced sizes determine both. The straight line between them lies above that curve and serves as the upper bound. Below the
short size, the memory of the short size applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.batches.pieces import bounds, pieces_by_size
from memfit.planning.plan import Plan
from memfit.planning.search import micro_batch_sizes
from memfit.profiling.allocator import Peak
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import Timing

Ends = tuple[tuple[int, Profile], tuple[int, Profile]]
"""((elements, profile) of a short sample, (elements, profile) of the longest), both with the plan's blocks checkpointed."""


def peak_between(ends: Ends, elements: int, samples: int, *, accumulates: bool = True) -> Peak:
    """Interpolate the peak of a micro-batch of `samples` samples of `elements` elements each. `accumulates` says that gradients
    of other micro-batches exist already."""
    (low, small), (high, large) = ends
    a, b = small.peak(samples, accumulates=accumulates), large.peak(samples, accumulates=accumulates)
    if not low < elements < high:
        return b if elements >= high else a
    share = (elements - low) / (high - low)
    # The part that does not depend on samples: twice the samples double the rest.
    fixed = max(0, 2 * a.allocated - small.peak(2 * samples, accumulates=accumulates).allocated)
    per_element = _mixed((a.allocated - fixed) / max(1, low), (b.allocated - fixed) / high, share)
    allocated, upper = int(fixed + elements * per_element), int(_mixed(a.upper, b.upper, share))
    beyond = _mixed(a.expected - a.allocated, b.expected - b.allocated, share)
    return Peak(allocated, min(upper, int(allocated + beyond)), upper)


def profile_between(ends: Ends, elements: int, share: int) -> Profile:
    """Interpolate a profile for samples of `elements` elements, with upper bounds at the candidate micro-batch sizes."""
    peaks = tuple((n, peak_between(ends, elements, n)) for n in micro_batch_sizes(share))
    return replace(ends[1][1], timeline=None, points=(), peaks=peaks, source="traced at two sizes of sample", blocks=())


def by_size(ends: Ends, plan: Plan, room: int, middle: int, steps: int = 16) -> tuple[tuple[int, int, int], ...]:
    """Return rows of (elements of the largest sample, samples per micro-batch, most that fit), ascending. A micro-batch has as
    many elements as the plan's has at the median size `middle`, or fewer where memory forbids."""
    (low, _), (high, _) = ends
    table = []
    for k in range(steps + 1):
        elements = round(low + (high - low) * k / steps)
        wanted = max(1, plan.micro_batch * middle // max(1, elements))
        most = _largest_fitting(ends, elements, max(wanted, plan.share), room)
        table.append((elements, min(wanted, most), most))
    return tuple(table)


def peaks_of(ends: Ends, table: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Return for each row of `table` the (expected, upper) bytes at one sample per micro-batch, then at the most that fit."""
    found = []
    for elements, _, most in table:
        one, all_ = peak_between(ends, elements, 1), peak_between(ends, elements, most)
        found.append((one.expected, one.upper, all_.expected, all_.upper))
    return tuple(found)


def peak_of(ends: Ends, table: tuple[tuple[int, int, int], ...], sizes: Sequence[int]) -> Peak:
    """Return the peak of a batch of samples of these `sizes` (descending), split by `table`. The upper bound is that of the
    table's largest micro-batch, for any batch. The first and largest micro-batch finds no gradients of others."""
    largest = max((peak_between(ends, elements, n) for elements, n, _ in table), key=lambda peak: peak.upper)
    pieces = pieces_by_size(sizes, lambda size: next((n for elements, n, _ in table if size <= elements), table[-1][1]))
    met = [peak_between(ends, sizes[start], stop - start, accumulates=start > 0) for start, stop in bounds(pieces)]
    expected = max(met, key=lambda peak: peak.expected)
    return replace(expected, expected=min(expected.expected, largest.upper), upper=largest.upper)


def with_padding(profile: Profile, middle: int, sizes: Sequence[int]) -> Profile:
    """Scale a profile's timings on samples of `middle` elements by the padding of samples of these `sizes` (descending). Every
    sample is padded to the largest one in its micro-batch."""

    def padded(timing: Timing) -> Timing:
        factor = padded_elements(sizes, timing.samples * middle) / max(1, sum(sizes))
        return timing.scaled(factor, timing.samples)

    return replace(profile, timings=tuple(map(padded, profile.timings)))


def padded_elements(sizes: Sequence[int], wanted: int) -> int:
    """Return the padded elements of samples of these `sizes` (descending) in micro-batches of about `wanted` elements."""
    pieces = pieces_by_size(sizes, lambda size: wanted // max(1, size))
    return sum((stop - start) * sizes[start] for start, stop in bounds(pieces))


def _largest_fitting(ends: Ends, elements: int, wanted: int, room: int) -> int:
    low, high = 1, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if peak_between(ends, elements, middle).upper <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _mixed(a: float, b: float, share: float) -> float:
    return a + share * (b - a)
