"""Encodes ways of weighting losses so that ranks can exchange them, and finds one that holds on all ranks.

Each rank proves on its own samples how its micro-batches weigh. If labels are full on one and have gaps on another, the ranks
may choose differently. A rank's ways are what it proved and the rivals it could not tell apart. Not covered: weights set by
hand, which are compared only as such.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.engine.weighting import BY_SAMPLES, BY_TERM, CountOf, Weighting
from memfit.equivalence.leaf_counts import LeafCount


@dataclass(frozen=True)
class Way:
    """A way of weighting (a loss reduction) that can be exchanged between ranks."""

    kind: str
    """samples, term, sum, count, or "by hand"."""
    count: LeafCount | None = None
    """What is counted, if it can be exchanged."""

    @property
    def code(self) -> int:
        """A number that identifies it."""
        return zlib.crc32(repr((self.kind, self.count)).encode())


def way_of(weighting: Weighting) -> Way:
    """Returns the way in use."""
    if weighting.kind != "count":
        return Way(weighting.kind)
    return _counting(weighting.count)


def ways_of(weighting: Weighting, *, unproven: bool) -> tuple[Way, ...]:
    """Returns all ways that hold on this rank, the one in use first. Returns none if nothing was proven, since any will do."""
    if unproven:
        return ()
    sums = (Way("sum"),) if weighting.sums else ()
    return way_of(weighting), *(_counting(rival) for rival in weighting.rivals), *sums


def common(told: Sequence[tuple[Way, ...]]) -> Way | None:
    """Returns the first way that holds on all ranks, or None."""
    known = [ways for ways in told if ways]
    every = (way for ways in known for way in ways)
    return next((way for way in every if all(way in ways for ways in known)), None)


def weighting_by(way: Way) -> Weighting:
    """Returns the weighting for a way."""
    if way.count is not None:
        return Weighting("count", f"by {way.count.label}", count=way.count, inferred=True)
    return {"term": BY_TERM, "sum": Weighting("sum", "as a sum")}.get(way.kind, BY_SAMPLES)


def _counting(count: CountOf | None) -> Way:
    return Way("count", count) if isinstance(count, LeafCount) else Way("by hand")


def agree(one: Weighting, other: Weighting) -> bool:
    """Whether two proofs on different samples share a way of weighting. Otherwise their results held by chance."""
    return bool({way.code for way in ways_of(one, unproven=False)} & {way.code for way in ways_of(other, unproven=False)})
