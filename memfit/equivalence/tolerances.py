"""How far two results differ, and how far they may."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Relative difference up to which whole and parts count as equal. Rounding of two summation orders stays an order of magnitude
below, mixing of samples lies above. float64 models often compute a softmax or a loss in float32 internally."""

SOME = 1 << 17
"""Elements compared at a time: 1 MiB in float64."""


@dataclass(frozen=True)
class Deviation:
    """How far parts deviate from the whole."""

    where: str
    """The output or module that deviates most."""
    relative: float
    """Relative L2 difference."""
    limit: float
    """Tolerance: the largest difference that counts as equal."""
    others: tuple[str, ...] = ()
    """Other outputs or modules that deviate by more than their limit."""
    by: Literal["mixing", "moving", "reading", "counting"] = "mixing"
    """The cause: samples mix (`mixing`), parts move state differently (`moving`), or code branches on values that it reads off
    the batch (`reading`) or on the number of samples (`counting`)."""

    @property
    def agrees(self) -> bool:
        """Whether parts and whole count as equal."""
        return self.relative <= self.limit


def relative_difference(wanted: torch.Tensor, made: torch.Tensor) -> float:
    """Return the relative L2 difference: infinity if shapes differ, NaN if NaNs are in different places."""
    if wanted.shape != made.shape:
        return float("inf")
    squares = norm = 0.0
    for a, b in in_double(wanted, made):
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, torch.zeros_like(a), a - b)  # equal infinities (masks) do not differ
        squares += float(difference.square().sum())
        norm += float(torch.where(a.isfinite(), a, torch.zeros_like(a)).square().sum())
    return math.sqrt(squares) / max(math.sqrt(norm), 1e-30)


def in_double(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield the entries of same-shape tensors in float64, in chunks: all at once would take more memory than the tensors."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for at in range(0, max(1, flat[0].numel()), SOME):
        yield [tensor[at : at + SOME].double() for tensor in flat]


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference up to which tensors of this precision count as equal."""
    return TOLERANCE.get(dtype, TOLERANCE[torch.float32])
