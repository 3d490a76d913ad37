"""Copies the script's loader with an order that memfit controls, and decides how its batches become effective batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from memfit._errors import UsageError
from memfit.loading.draws import Order
from memfit.loading.packing import PackingCollate, keep
from memfit.loading.parts import RankSampler
from memfit.loading.pieces import CountingCollate, Grouping
from memfit.loading.watch import Watch


def grouping_of(source: DataLoader[Any], share: int | None, collated: bool) -> Grouping | None:
    """Return how pieces become effective batches; None if the script's own batches pass through unchanged."""
    sampler = source.batch_sampler
    if sampler is None or (share is None and collated):
        return None
    if share is None:
        return Grouping(1, whole=True)
    if type(sampler) is BatchSampler:
        return Grouping(share, drop_last=sampler.drop_last)
    return Grouping(share, whole=True)


def check_positive(share: int | None) -> None:
    """Raise UsageError if effective batches would be empty on this rank."""
    if share is not None and share < 1:
        raise UsageError(
            f"effective batches of {share} samples on this rank",
            found="an effective batch holds at least one sample",
            next_move="ask for a target batch of at least the number of processes",
        )


def inner_loader(
    source: DataLoader[Any],
    grouping: Grouping | None,
    watch: Watch,
    *,
    pins: bool,
    part: Callable[[Any], RankSampler] | None = None,
) -> tuple[DataLoader[Any], Order]:
    """Return a copy of the script's loader, of the same class, and the order that controls it. The copy's collate function is
    replaced if batches are regrouped or counted; with `part`, it loads only this rank's indices."""
    changes: dict[str, Any] = {"_iterator": None, "pin_memory": pins}
    sampler: Any = source.sampler if source.batch_sampler is None else source.batch_sampler
    if grouping is not None:
        changes.update(collate_fn=PackingCollate() if source.num_workers else keep, pin_memory=False)
        if not grouping.whole:  # a short script batch at the end is still part of an effective batch
            indices = sampler.sampler if part is None else part(sampler.sampler)
            sampler = BatchSampler(indices, sampler.batch_size, drop_last=False)
            changes.update(drop_last=False)
    elif source.batch_sampler is not None and type(source).__iter__ is DataLoader.__iter__:
        changes.update(collate_fn=CountingCollate(source.collate_fn))
    order = Order(sampler, watch)
    changes["sampler" if source.batch_sampler is None else "batch_sampler"] = order
    inner = copy.copy(source)
    inner.__dict__.update(changes)
    return inner, order


def iterations(source: DataLoader[Any], grouping: Grouping) -> int:
    """Return the effective batches in an epoch; an estimate if joined batches of a batch sampler vary in size."""
    sampler: Any = source.batch_sampler
    if grouping.whole:
        batches = len(sampler)
        size = getattr(sampler, "batch_size", None) or len(source.dataset) / max(batches, 1)  # type: ignore[arg-type]
        return _quotient(batches, _quotient(grouping.size, size))
    samples = len(source.dataset if isinstance(source.dataset, IterableDataset) else sampler.sampler)  # type: ignore[arg-type]
    return samples // grouping.size if grouping.drop_last else _quotient(samples, grouping.size)


def leftover(source: Any, share: int | None) -> int | None:
    """Return the samples in the last, smaller effective batch of an epoch (0: there is none); None if not known."""
    sampler = source.batch_sampler if isinstance(source, DataLoader) else None
    if type(sampler) is not BatchSampler or isinstance(source.dataset, IterableDataset):
        return None
    try:
        return 0 if sampler.drop_last else len(sampler.sampler) % (share or sampler.batch_size)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _quotient(total: float, size: float) -> int:
    return int(-(-total // size))
