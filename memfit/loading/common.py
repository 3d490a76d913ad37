"""Drawing the same order in all processes: rank 0's.

Scripts seed their processes alike, or not; an order that is divided has to be one. At the beginning of every epoch the others
are told the state of rank 0's generators, and draw from that; their own generators go on as they would have. Not covered:
samplers that draw while they are under way, or from NumPy or `random`; where processes then differ, that is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from memfit.loading.draws import Order, Stream, generator_of, keeps_own_order
from memfit.loading.parts import Division, check_length
from memfit.loading.pieces import Grouping
from memfit.loading.position import Start
from memfit.loading.shares import Shares
from memfit.ranks.ranks import Ranks

DRAWING = "an epoch of the loader"


class CommonDraws:
    """What `ranks` agree on about the order of their loaders; `tell` says to the user what cannot be had."""

    def __init__(self, ranks: Ranks, tell: Callable[[str], None]) -> None:
        self.ranks, self._tell = ranks, tell

    def division(self, source: DataLoader[Any], grouping: Grouping, *, never_empty: bool) -> Division | None:
        """How effective batches are divided; None where each process's own loader has to be taken for its part. Raises
        UsageError for a sampler without length."""
        if grouping.whole or isinstance(source.dataset, IterableDataset) or type(source.batch_sampler) is not BatchSampler:
            kind = "IterableDataset" if isinstance(source.dataset, IterableDataset) else type(source.batch_sampler).__name__
            self._tell(
                f"each process's own batches are taken for its part, as they come through a {kind}: which samples a step has "
                "depends on the number of processes"
            )
            return None
        check_length(source.batch_sampler.sampler, grouping.size, self.ranks.size)
        return Division(grouping.size, self.ranks.rank, self.ranks.size, grouping.drop_last, never_empty)

    def begin(self, mine: Start, order: Order, generator: torch.Generator | None) -> Start:
        """An epoch begins: what rank 0 draws its order from, which is drawn alike on every process. It is drawn apart where
        any has to."""
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
        """An epoch begins, divided as rank 0 divides it."""
        shares.begin(self.ranks.gather(shares.latest, DRAWING)[0])

    def differ(self, indices: list[Any]) -> bool:
        """Whether the processes are given different indices for their first effective batch."""
        digest = hashlib.sha256(repr(indices).encode()).digest()
        apart = len(set(self.ranks.gather(digest, DRAWING))) > 1
        if apart:
            self._tell(
                "the loader's sampler gives every process indices of its own, which are taken for its part: which samples a "
                "step has depends on the number of processes"
            )
        return apart
