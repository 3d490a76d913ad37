"""Shards effective batches among ranks; a batch has the same samples at any number of ranks.

Effective batch t is the t-th run of `target_batch` indices in the order that the script's sampler draws. Every rank takes a
contiguous part of it, as large as `Shares` says. So all ranks draw all indices, but load only their own samples. Not covered:
samplers other than DistributedSampler that already give every rank its own indices (detected: they differ between ranks), and
samplers without a length.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DistributedSampler

from memfit._errors import UsageError
from memfit.loading.shares import Shares


@dataclass(frozen=True)
class ShareDivision:
    """Describes how effective batches are divided among ranks."""

    size: int
    """Samples in an effective batch over all ranks."""
    rank: int
    """This rank."""
    ranks: int
    """The number of ranks (world size)."""
    drop_last: bool
    """Whether a last, smaller effective batch is dropped."""
    never_empty: bool
    """Whether a rank without a sample of a batch still gets one, which then must have weight 0."""
    shares: Shares = field(init=False, compare=False)
    """Which part each rank has."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", Shares(self.size, self.ranks))

    def batches(self, samples: int) -> int:
        """Return the number of effective batches in an epoch of `samples` samples."""
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def own(self, index: int, samples: int) -> int:
        """Return how many samples of effective batch `index` are this rank's own."""
        return self.shares.parts(index, min(self.size, samples - index * self.size))[self.rank]

    def taken(self, index: int, samples: int) -> int:
        """Return how many of its samples this rank loads."""
        return max(self.own(index, samples), 1 if self.never_empty else 0)


def counts_of(division: ShareDivision, samples: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield for each effective batch, starting with `first`: (samples that this rank loads, those of them that are its own)."""
    return ((division.taken(i, samples), division.own(i, samples)) for i in range(first, division.batches(samples)))


class RankSampler:
    """Yields this rank's indices of `sampler`. `differ(indices)` says whether other ranks get other indices."""

    def __init__(self, sampler: Any, division: ShareDivision, differ: Callable[[list[Any]], bool]) -> None:
        self.sampler, self.division = over_all(sampler), division
        self._differ = differ
        self._apart: bool | None = None
        """Whether the sampler gives every rank its own indices; None until checked."""
        self.through: Callable[[Iterator[Any]], Iterator[Any]] = iter
        """Sees all indices."""

    def __len__(self) -> int:
        division, samples = self.division, len(self.sampler)
        return sum(division.taken(i, samples) for i in range(division.batches(samples)))

    def __iter__(self) -> Iterator[Any]:
        division, samples = self.division, len(self.sampler)
        indices = self.through(iter(self.sampler))
        for number in range(division.batches(samples)):
            batch = list(itertools.islice(indices, division.size))
            if self._apart is None:
                self._apart = division.shares.fixed = self._differ(batch)
            division.shares.drawing(number)
            yield from batch[: division.taken(number, samples)] if self._apart else self._mine(number, batch)

    def _mine(self, number: int, batch: list[Any]) -> list[Any]:
        division = self.division
        parts = division.shares.parts(number, len(batch))
        start = sum(parts[: division.rank])
        found = batch[start : start + parts[division.rank]]
        return found or (batch[:1] if division.never_empty else [])


def over_all(sampler: Any) -> Any:
    """Return the sampler over all ranks' samples: for a DistributedSampler, which covers one rank's, one that covers the whole
    order."""
    return _Undistributed(sampler) if isinstance(sampler, DistributedSampler) else sampler


class _Undistributed(Iterable[int], Sized):
    """The order that all ranks' DistributedSamplers divide, in the epoch set on the script's own, without the samples that they
    add or drop to come out even."""

    def __init__(self, own: DistributedSampler[Any]) -> None:
        self._own = own

    def __len__(self) -> int:
        return len(self._own.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        whole = copy.copy(self._own)
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = len(self)
        return iter(whole)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch on the script's own sampler."""
        self._own.set_epoch(epoch)


def check_length(sampler: Any, size: int, ranks: int) -> None:
    """Raise UsageError for a sampler without a length, whose effective batches cannot be counted in advance."""
    try:
        len(over_all(sampler))
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"effective batches of {size} samples over {ranks} processes",
            found=f"the loader's {type(sampler).__name__} has no length, so no process can tell when the others end",
            next_move="give the sampler a __len__, or omit target_batch: each process's batches are then its part",
        ) from None
