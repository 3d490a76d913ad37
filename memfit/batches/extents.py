"""How large samples are, tensor by tensor: padded together, samples are as large in each tensor as the largest of them in that.

One that has long audio and a short text, beside one that has short audio and a long text, is neither larger nor smaller: what
both come to in one micro-batch is larger than either.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

Extent = tuple[int, ...]
"""Elements of each tensor of a sample."""


def together(extents: Iterable[Extent]) -> Extent:
    """What samples come to in each tensor that are padded together."""
    found = list(extents)
    return tuple(map(max, *found)) if len(found) > 1 else found[0]


def of_those_after(extents: Sequence[Extent]) -> list[Extent]:
    """For each sample, what it and all after it come to together."""
    found: list[Extent] = []
    for extent in reversed(extents):
        found.append(together((found[-1], extent)) if found else extent)
    return found[::-1]


class Scale:
    """Sizes in one number for what was planned at: samples of these extents, which in no tensor grow smaller along the list.

    What lies between two of them is as large as the tensor that is largest beside theirs.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._sizes = [sum(extent) for extent in extents]
        self._tensors = list(zip(*extents))

    def covers(self, extent: Extent) -> bool:
        """Whether samples of this extent are in no tensor larger than the largest."""
        return len(extent) == len(self._tensors) and all(n <= known[-1] for n, known in zip(extent, self._tensors))

    def within(self, extent: Extent) -> bool:
        """Whether the largest is in no tensor larger than this."""
        return len(extent) == len(self._tensors) and all(n >= known[-1] for n, known in zip(extent, self._tensors))

    def size(self, extent: Extent) -> int:
        """The size of samples that are covered: at least their elements, and at least as large as any that was planned at and
        is in no tensor larger than they."""
        return max((sum(extent), *(math.ceil(self._beside(n, known)) for n, known in zip(extent, self._tensors))))

    def _beside(self, elements: int, known: Sequence[int]) -> float:
        """The size at which this tensor has so many elements."""
        at = bisect.bisect_left(known, elements)
        if at == 0 or at == len(known):
            return 0.0  # what sums say is enough where all are smaller; nothing is larger
        low, high = known[at - 1], known[at]
        share = (elements - low) / (high - low)
        return round(self._sizes[at - 1] + share * (self._sizes[at] - self._sizes[at - 1]), 6)
