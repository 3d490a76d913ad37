"""Micro-batches for samples of different sizes, from profiles at a short and at the longest sample.

What a sample adds is a linear and a quadratic part of its size (linear layers; attention by operations), which two traced
sizes determine. The line between them lies above that and is taken for the upper bound; below the short one, that one's
memory is.
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
"""((elements, profile) of a short sample, the same of the longest), both with the plan's blocks checkpointed."""


def peak_between(ends: Ends, elements: int, samples: int, *, accumulates: bool = True) -> Peak:
    """The peak of micro-batches of `samples` samples of that many elements, on gradients of others if it `accumulates`."""
    (low, small), (high, large) = ends
    a, b = small.peak(samples, accumulates=accumulates), large.peak(samples, accumulates=accumulates)
    if not low < elements < high:
        return b if elements >= high else a
    share = (elements - low) / (high - low)
    # What does not depend on samples at all: what is left of the peak where as many again add as much again.
    fixed = max(0, 2 * a.allocated - small.peak(2 * samples, accumulates=accumulates).allocated)
    per_element = _mixed((a.allocated - fixed) / max(1, low), (b.allocated - fixed) / high, share)
    allocated, upper = int(fixed + elements * per_element), int(_mixed(a.upper, b.upper, share))
    beyond = _mixed(a.expected - a.allocated, b.expected - b.allocated, share)
    return Peak(allocated, min(upper, int(allocated + beyond)), upper)


def profile_between(ends: Ends, elements: int, share: int) -> Profile:
    """A profile for samples of that many elements, as upper bounds at the sizes worth looking at."""
    peaks = tuple((n, peak_between(ends, elements, n)) for n in micro_batch_sizes(share))
    return replace(ends[1][1], timeline=None, points=(), peaks=peaks, source="traced at two sizes of sample", blocks=())


def by_size(ends: Ends, plan: Plan, room: int, middle: int, steps: int = 16) -> tuple[tuple[int, int, int], ...]:
    """(elements of the largest sample, samples per micro-batch, most that fit) in ascending order: as many elements per
    micro-batch as the plan has at the median, fewer where memory forbids."""
    (low, _), (high, _) = ends
    table = []
    for k in range(steps + 1):
        elements = round(low + (high - low) * k / steps)
        wanted = max(1, plan.micro_batch * middle // max(1, elements))
        most = _largest_fitting(ends, elements, max(wanted, plan.share), room)
        table.append((elements, min(wanted, most), most))
    return tuple(table)


def peaks_of(ends: Ends, table: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int, int], ...]:
    """For each entry of a table: (expected, upper) bytes with one sample per micro-batch, the same with the most."""
    found = []
    for elements, _, most in table:
        one, all_ = peak_between(ends, elements, 1), peak_between(ends, elements, most)
        found.append((one.expected, one.upper, all_.expected, all_.upper))
    return tuple(found)


def peak_of(ends: Ends, table: tuple[tuple[int, int, int], ...], sizes: Sequence[int]) -> Peak:
    """The peak of a batch of samples of these sizes, in descending order, cut by a table; its upper bound is that of the
    largest micro-batch in the table, whatever comes. The first and largest micro-batch meets no gradients of others."""
    largest = max((peak_between(ends, elements, n) for elements, n, _ in table), key=lambda peak: peak.upper)
    pieces = pieces_by_size(sizes, lambda size: next((n for elements, n, _ in table if size <= elements), table[-1][1]))
    met = [peak_between(ends, sizes[start], stop - start, accumulates=start > 0) for start, stop in bounds(pieces)]
    expected = max(met, key=lambda peak: peak.expected)
    return replace(expected, expected=min(expected.expected, largest.upper), upper=largest.upper)


def with_padding(profile: Profile, middle: int, sizes: Sequence[int]) -> Profile:
    """The profile, timed on samples of `middle` elements, with the seconds that micro-batches of samples of these sizes, in
    descending order, take for as many elements: samples are padded to the largest they stand with."""

    def padded(timing: Timing) -> Timing:
        factor = padded_elements(sizes, timing.samples * middle) / max(1, sum(sizes))
        return timing.scaled(factor, timing.samples)

    return replace(profile, timings=tuple(map(padded, profile.timings)))


def padded_elements(sizes: Sequence[int], wanted: int) -> int:
    """Elements that micro-batches of about `wanted` elements compute of samples of these sizes, in descending order."""
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
