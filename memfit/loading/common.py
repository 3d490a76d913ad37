"""Draws the same sample order on all ranks: rank 0's.

Scripts may or may not seed their ranks alike, but ranks can only divide one common order. At the beginning of every epoch, the
other ranks receive the state of rank 0's generators and draw from it; their global generators go on undisturbed. Not
covered: samplers that draw later in the epoch, or from NumPy or `random`; memfit detects if ranks then differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from memfit.loading.draws import Order, Stream, generator_of, keeps_own_order
from memfit.loading.parts import ShareDivision, check_length
from memfit.loading.pieces import Grouping
from memfit.loading.position import Start
from memfit.loading.shares import Shares
from memfit.ranks.ranks import Ranks

DRAWING = "an epoch of the loader"


class CommonDraws:
    """Makes `ranks` agree on the order of their loaders; `tell` tells the user where that is not possible."""

    def __init__(self, ranks: Ranks, tell: Callable[[str], None]) -> None:
        self.ranks, self._tell = ranks, tell

    def division(self, source: DataLoader[Any], grouping: Grouping, *, never_empty: bool) -> ShareDivision | None:
        """Return how effective batches are divided among ranks; None if each rank's own batches have to be its part. Raises
        UsageError for a sampler without length."""
        if grouping.whole or isinstance(source.dataset, IterableDataset) or type(source.batch_sampler) is not BatchSampler:
            kind = "IterableDataset" if isinstance(source.dataset, IterableDataset) else type(source.batch_sampler).__name__
            self._tell(
                f"each process's own batches are its part, as they come through a {kind}: which samples a step has "
                "depends on the number of processes"
            )
            return None
        check_length(source.batch_sampler.sampler, grouping.size, self.ranks.size)
        return ShareDivision(grouping.size, self.ranks.rank, self.ranks.size, grouping.drop_last, never_empty)

    def begin(self, mine: Start, order: Order, generator: torch.Generator | None) -> Start:
        """Begin an epoch: return what rank 0 draws its order from, and make this rank draw the same. If any rank has to draw
        `apart` (from a derived stream), all do."""
        told: list[Start] = self.ranks.gather(mine, DRAWING)
        first = replace(told[0], apart=any(each.apart for each in told))
        if self.ranks.rank and not first.apart:
            own = generator_of(order.sampler) or generator
            if own is not None and first.own is not None:
                own.set_state(first.own)
            if not keeps_own_order(order.sampler):
                order.stream = Stream(state=first.state)
        return first

    def begin_shares(self, shares: Shares) -> None:
        """Begin an epoch, divided as rank 0 divides it."""
        shares.begin(self.ranks.gather(shares.latest, DRAWING)[0])

    def differ(self, indices: list[Any]) -> bool:
        """Whether the ranks' samplers give different indices for the first effective batch."""
        digest = hashlib.sha256(repr(indices).encode()).digest()
        apart = len(set(self.ranks.gather(digest, DRAWING))) > 1
        if apart:
            self._tell(
                "the loader's sampler gives every process indices of its own, which are its part: which samples a "
                "step has depends on the number of processes"
            )
        return apart
