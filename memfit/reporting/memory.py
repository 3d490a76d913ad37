"""Turns a timeline into what a report shows: the memory curve of one step, and the memory of each block.

Not covered: memory outside tensors (the allocator's own, kernels' scratch); the plan's predicted peak counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from memfit.profiling.timeline import CATEGORIES, Timeline
from memfit.profiling.tree import kept_by_forward
from memfit.reporting.facts import BlockCost, Curve, PhasePeak

POINTS = 2000
"""Maximum number of points in a curve, more than a screen has pixels for."""


def curve_of(timeline: Timeline, samples: int, *, accumulates: bool, points: int = POINTS) -> Curve:
    """Compute the curve of a step with micro-batches of `samples`, in at most `points` points that keep each phase's peak."""
    happens = _happening(timeline, accumulates)
    totals = timeline.curve(samples)[happens]
    phases = _phases(timeline, happens)
    peaks = [begin + int(totals[begin:end].argmax()) for _, begin, end in phases]
    chosen = _thinned(totals, points, peaks)
    layers = _layers(timeline, samples, happens)
    moments = tuple(_moment(timeline, happens, name, begin, peak, layers) for (name, begin, _), peak in zip(phases, peaks))
    drawn = tuple((name, tuple(map(int, np.rint(sizes[chosen])))) for name, sizes in layers.items() if sizes.any())
    windows = len(timeline.window) if accumulates else 1
    return Curve(samples, windows, tuple(map(int, chosen)), drawn, moments)


def _happening(timeline: Timeline, accumulates: bool) -> np.ndarray:
    """The events of the step itself, without the births of what exists before it. Without gradient accumulation, they do
    not include the second micro-batch's."""
    start = max(0, timeline.phases[1].start - 1) if len(timeline.phases) > 1 else 0
    happens = np.arange(start, len(timeline.event))
    if accumulates or len(timeline.window) < 2:
        return happens
    over = next((p.start for p in timeline.phases if p.name == "hand over"), len(timeline.event))
    return happens[(happens < timeline.window[1]) | (happens >= over)]


def _phases(timeline: Timeline, happens: np.ndarray) -> list[tuple[str, int, int]]:
    """(name, begin, end) of each phase with events, as positions in `happens`."""
    starts = [*(p.start for p in timeline.phases), len(timeline.event)]
    found = []
    for index, phase in enumerate(timeline.phases):
        begin, end = (int(np.searchsorted(happens, starts[index + k])) for k in (0, 1))
        if begin < end and phase.name != "present":
            found.append((phase.name, begin, end))
    return found or [("step", 0, len(happens))]


def _layers(timeline: Timeline, samples: int, happens: np.ndarray) -> dict[str, np.ndarray]:
    """Bytes alive in each category after each of these events."""
    signed = np.where(timeline.birth, 1.0, -1.0) * timeline.sizes(samples)[timeline.event]
    category = timeline.category[timeline.event]
    return {name: np.cumsum(np.where(category == index, signed, 0.0))[happens] for index, name in enumerate(CATEGORIES)}


def _moment(
    timeline: Timeline, happens: np.ndarray, name: str, begin: int, peak: int, layers: Mapping[str, np.ndarray]
) -> PhasePeak:
    event = int(happens[peak])
    inside = sum(1 for start in timeline.window if start <= event) if name in ("input", "forward", "backward") else 0
    where = timeline.owners[int(timeline.owner[timeline.event[event]])]
    holds = tuple((kind, int(np.rint(sizes[peak]))) for kind, sizes in layers.items() if sizes[peak] > 0.5)
    return PhasePeak(name, inside, begin, where, holds)


def _thinned(totals: np.ndarray, points: int, always: Sequence[int]) -> np.ndarray:
    """Positions of at most `points` values: the first, the last, the lowest and highest of each stretch, and `always`."""
    if len(totals) <= points:
        return np.arange(len(totals))
    keep = {0, len(totals) - 1, *always}
    stretches = max(1, (points - len(keep)) // 2)
    edges = np.linspace(0, len(totals), stretches + 1).astype(int)
    for begin, end in pairwise(edges):
        if begin < end:
            keep |= {begin + int(totals[begin:end].argmin()), begin + int(totals[begin:end].argmax())}
    return np.array(sorted(keep))


# ---- by block


def block_costs(timeline: Timeline, samples: int, blocks: Sequence[str]) -> tuple[BlockCost, ...]:
    """Compute the kept and transient bytes of one micro-batch by block, and of the rest; kept bytes add up to the total."""
    names = tuple(blocks) or _outermost(timeline)
    group = _groups(timeline.owners, names)[timeline.owner]
    sizes = timeline.sizes(samples)
    kept = np.where(kept_by_forward(timeline), sizes, 0.0)
    found = []
    for index, name in enumerate([*names, ""]):
        mine = group == index
        found.append(BlockCost(name, int(np.rint(kept[mine].sum())), _most_transient(timeline, mine, sizes)))
    return tuple(found)


def _outermost(timeline: Timeline) -> tuple[str, ...]:
    """The outermost modules that allocate, for a model without blocks."""
    computed = np.isin(timeline.category, [CATEGORIES.index(name) for name in ("kept", "transient")])
    owners = (timeline.owners[owner] for owner in timeline.owner[computed].tolist())
    return tuple(dict.fromkeys(owner.partition(".")[0] for owner in owners if owner))


def _groups(owners: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """For each owner, the position of the innermost named block that contains it; `len(names)` if none does."""
    order = sorted(range(len(names)), key=lambda i: -len(names[i]))

    def group(owner: str) -> int:
        inside = (i for i in order if owner == names[i] or owner.startswith(f"{names[i]}."))
        return next(inside, len(names))

    return np.array([group(owner) for owner in owners], dtype=np.int32)


def _most_transient(timeline: Timeline, mine: np.ndarray, sizes: np.ndarray) -> int:
    chosen = mine & (timeline.category == CATEGORIES.index("transient"))
    signed = np.where(timeline.birth, sizes[timeline.event], -sizes[timeline.event])
    return int(np.cumsum(np.where(chosen[timeline.event], signed, 0.0)).max(initial=0.0))
