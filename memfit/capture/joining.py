"""Joins an output micro-batch by micro-batch, without holding both the parts and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.batches.pieces import bounds
from memfit.capture.output_leaf import Leaf


class Joining:
    """Joins one leaf of the output."""

    def __init__(self, leaf: Leaf, sizes: Sequence[int]) -> None:
        self._leaf, self._sizes = leaf, sizes
        self._whole: torch.Tensor | None = None
        self._parts: list[Any] = []
        self._filled = 0

    def add(self, part: Any) -> None:
        """Adds the leaf of the next micro-batch. Raises Refused if its size does not match its samples."""
        size = self._sizes[len(self._parts)]
        self._leaf.check([part], [size])
        axis, stop = self._leaf.axis, self._filled + size
        if not self._parts and axis is not None and axis.outer == 1 and _is_ordinary(part):
            self._whole = part.new_empty(
                (*part.shape[: axis.dim], axis.size(sum(self._sizes)), *part.shape[axis.dim + 1 :])
            )
        if self._whole is not None and axis is not None:
            place = axis.narrow(self._whole, self._filled, stop)
            if not _is_ordinary(part) or place.shape != part.shape or place.dtype != part.dtype:
                self._parts = [axis.narrow(self._whole, a, b) for a, b in self._bounds()]
                self._whole = None  # torch joins mixed parts by its own rules, and raises its own errors
            else:
                place.copy_(part)
                part = None
        self._parts.append(part)
        self._filled = stop

    def whole(self) -> Any:
        """Returns the leaf of all samples."""
        return self._leaf.join(self._parts, self._sizes) if self._whole is None else self._whole

    def _bounds(self) -> list[tuple[int, int]]:
        return list(bounds(self._sizes))[: len(self._parts)]


def _is_ordinary(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.layout is torch.strided and part.is_contiguous()
