"""Configures the script's training loader by accelerate's settings, before memfit makes effective batches of it.

memfit itself splits map-style data sets with samplers among the ranks. IterableDatasets, and batches from the script's own
batch sampler, are split by accelerate's classes. Raises Refused for dispatch_batches=True with several ranks, and for
torchdata's stateful loaders. Not covered: streams whose order differs between ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
)
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, send_to_device
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from memfit import Refused


@dataclass(frozen=True)
class RankPlace:
    """One rank among those that train together."""

    index: int
    """Its rank."""
    processes: int
    """The world size."""


def as_configured(loader: DataLoader[Any], settings: DataLoaderConfiguration, place: RankPlace) -> DataLoader[Any]:
    """Return the loader, or a copy with the order or the shard of accelerate's. Raises Refused for unsupported settings."""
    _check(loader, settings, place)
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if settings.use_seedable_sampler and type(loader.batch_sampler) is BatchSampler and isinstance(sampler, RandomSampler):
        sampler = _seedable(sampler, settings.data_seed)
        batches = BatchSampler(sampler, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
        return _with(loader, sampler=sampler, batch_sampler=batches)
    if place.processes == 1:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return _with(loader, dataset=_part_of_stream(loader, settings, place))
    if type(loader.batch_sampler) is BatchSampler:
        return loader
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if not hasattr(batches, "batch_size"):
        raise _undivided(type(batches).__name__, place)
    part = BatchSamplerShard(batches, place.processes, place.index, settings.split_batches, settings.even_batches)
    return _with(loader, **{"sampler" if loader.batch_sampler is None else "batch_sampler": part})


def _check(loader: DataLoader[Any], settings: DataLoaderConfiguration, place: RankPlace) -> None:
    if isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        raise Refused(
            "a training loader that accelerate has prepared already",
            found="it divides its batches among the processes by itself",
            next_move="pass the plain DataLoader to prepare, together with the model and its optimizer",
        )
    if settings.use_stateful_dataloader:
        raise Refused(
            "a training loader with use_stateful_dataloader=True",
            found="memfit regroups the script's batches, and torchdata's loader keeps the position of these",
            next_move="leave it out of DataLoaderConfiguration",
        )
    if settings.dispatch_batches and place.processes > 1:
        raise Refused(
            f"a training loader with dispatch_batches=True over {place.processes} processes",
            found="each process reads its own part of every effective batch, and none reads for the others",
            next_move="leave it out of DataLoaderConfiguration, and let every process open the dataset",
        )


def _undivided(kind: str, place: RankPlace) -> Refused:
    return Refused(
        f"a training loader with a {kind} over {place.processes} processes",
        found="it does not say how many samples its batches have (batch_size), so they cannot be divided",
        next_move="give it the attribute batch_size, or let DataLoader make the batches",
    )


def _seedable(sampler: RandomSampler, seed: int | None) -> SeedableRandomSampler:
    """Return accelerate's sampler, with the main process's seed on all ranks."""
    told = [torch.random.initial_seed() if seed is None else seed]
    broadcast_object_list(told)
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator() if sampler.generator is None else sampler.generator,
        data_seed=told[0],
    )


def _part_of_stream(loader: DataLoader[Any], settings: DataLoaderConfiguration, place: RankPlace) -> IterableDatasetShard:
    return IterableDatasetShard(
        loader.dataset,  # type: ignore[arg-type]
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
        num_processes=place.processes,
        process_index=place.index,
        split_batches=settings.split_batches,
    )


def _with(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of the loader, of the same class. (torch guards these attributes against late changes.)"""
    made = copy.copy(loader)
    made.__dict__.update(changes, _iterator=None)
    return made


class OnDevice:
    """Yields the loader's batches on `device`, and tells the samplers the epoch. Everything else is the loader's.

    Attribute: `iteration` (the current epoch, counted as in accelerate's loaders).
    """

    def __init__(self, loader: Any, device: torch.device, moves: bool) -> None:
        self.loader, self.device, self._moves = loader, device, moves
        self.iteration, self._skipped = 0, 0
        self._under_way: list[OnDevice] = []

    @property
    def iterating(self) -> bool:
        """Whether an epoch is in progress, of this loader or of one made by `after`."""
        return bool(self._under_way)

    def after(self, batches: int) -> OnDevice:
        """Return the same loader without the first batches of an epoch. They are loaded and dropped only if unavoidable."""
        made = copy.copy(self)
        made._skipped += batches
        return made

    def __iter__(self) -> Iterator[Any]:
        moves = self._moves and self.device.type != "cpu"
        self.set_epoch(self.iteration)
        self._under_way.append(self)
        try:
            for batch in self._rest():
                yield send_to_device(batch, self.device, non_blocking=True) if moves else batch
        finally:
            self._under_way.remove(self)
        self.iteration += 1

    def __len__(self) -> int:
        return max(0, len(self.loader) - self._skipped)

    def _rest(self) -> Iterator[Any]:
        begin_at = getattr(self.loader, "begin_at", None)
        if not self._skipped or (begin_at is not None and begin_at(self._skipped)):
            return iter(self.loader)
        return itertools.islice(self.loader, self._skipped, None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the data set, if they support it, like accelerate's loaders."""
        self.iteration = epoch
        batches = getattr(self.loader, "batch_sampler", None)
        inner = getattr(batches, "batch_sampler", batches)  # inside a sampler that shards another one
        told = [batches, inner, *(getattr(each, "sampler", None) for each in (inner, self.loader)), self.loader.dataset]
        for each in {id(each): each for each in told}.values():
            tell = getattr(each, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)
