"""Ways of weighting that processes can tell each other, and the one that holds on all of them.

Each process proves on samples of its own how its micro-batches weigh; where labels are full on one and have gaps on another,
they may choose differently. What a process proved, and what it could not tell apart from that, are its ways. Not covered:
weights stated by hand, which are compared by that alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.engine.accumulate import BY_SAMPLES, BY_TERM, CountOf, Weighting
from memfit.training.weigh import LeafCount


@dataclass(frozen=True)
class Way:
    """One way of weighting, as it can be told."""

    kind: str
    """samples, term, sum, count, or "by hand"."""
    count: LeafCount | None = None
    """What is counted, where that can be told."""

    @property
    def code(self) -> int:
        """A number that tells it from others."""
        return zlib.crc32(repr((self.kind, self.count)).encode())


def way_of(weighting: Weighting) -> Way:
    """The way that is used."""
    if weighting.kind != "count":
        return Way(weighting.kind)
    return _counting(weighting.count)


def ways_of(weighting: Weighting, *, unproven: bool) -> tuple[Way, ...]:
    """All that this process could use as well, the one in use first; none where nothing was proven, which any will do for."""
    if unproven:
        return ()
    sums = (Way("sum"),) if weighting.sums else ()
    return way_of(weighting), *(_counting(rival) for rival in weighting.rivals), *sums


def common(told: Sequence[tuple[Way, ...]]) -> Way | None:
    """The first way of any process that holds on all; None where there is none."""
    known = [ways for ways in told if ways]
    every = (way for ways in known for way in ways)
    return next((way for way in every if all(way in ways for ways in known)), None)


def weighting_by(way: Way) -> Weighting:
    """The way in use."""
    if way.count is not None:
        return Weighting("count", f"by {way.count.label}", count=way.count, inferred=True)
    return {"term": BY_TERM, "sum": Weighting("sum", "as a sum")}.get(way.kind, BY_SAMPLES)


def _counting(count: CountOf | None) -> Way:
    return Way("count", count) if isinstance(count, LeafCount) else Way("by hand")
