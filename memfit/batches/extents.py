"""Sample sizes per tensor. Samples that are padded together take, in each tensor, the size of the largest sample in it.

A sample with long audio and a short text is neither larger nor smaller than one with short audio and a long text. A
micro-batch of both is larger than either.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

Extent = tuple[int, ...]
"""Number of elements in each tensor of a sample."""


def together(extents: Iterable[Extent]) -> Extent:
    """Return the extent to which samples are padded in one batch: the maximum in each tensor."""
    found = list(extents)
    return tuple(map(max, *found)) if len(found) > 1 else found[0]


def of_those_after(extents: Sequence[Extent]) -> list[Extent]:
    """Return, for each sample, the padded extent of it and all later ones."""
    found: list[Extent] = []
    for extent in reversed(extents):
        found.append(together((found[-1], extent)) if found else extent)
    return found[::-1]


class Scale:
    """Maps extents to one number, a size, by interpolation between the planned extents. Those never shrink along the list.

    The size of an extent in between is that of the tensor that is largest relative to its planned values.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._sizes = [sum(extent) for extent in extents]
        self._tensors = list(zip(*extents))

    def covers(self, extent: Extent) -> bool:
        """Whether no tensor of this extent is larger than in the largest planned extent."""
        return len(extent) == len(self._tensors) and all(n <= known[-1] for n, known in zip(extent, self._tensors))

    def within(self, extent: Extent) -> bool:
        """Whether no tensor of the largest planned extent is larger than in this extent."""
        return len(extent) == len(self._tensors) and all(n >= known[-1] for n, known in zip(extent, self._tensors))

    def size(self, extent: Extent) -> int:
        """Return the size of a covered extent: at least its number of elements, and at least the size of every planned extent
        that is no larger in any tensor."""
        return max((sum(extent), *(math.ceil(self._beside(n, known)) for n, known in zip(extent, self._tensors))))

    def _beside(self, elements: int, known: Sequence[int]) -> float:
        """Return the interpolated size at which this tensor has that many elements."""
        at = bisect.bisect_left(known, elements)
        if at == 0 or at == len(known):
            return 0.0  # below all planned extents the element count suffices; none is above them
        low, high = known[at - 1], known[at]
        share = (elements - low) / (high - low)
        return round(self._sizes[at - 1] + share * (self._sizes[at] - self._sizes[at - 1]), 6)
