"""The script's DataLoader, made to yield effective batches: one iteration is one optimizer step.

The loading itself stays the script's: its sampler, its batches, its workers. Workers hand over the samples of each
script batch, called a *piece*, packed instead of collated; the main process regroups pieces into effective batches and
collates those. So workers never hold more than the script's own batches in shared memory, and the first piece is there
as early as ever. Not covered: loading further ahead than the script's own prefetching (that would take room), and
collating in workers once pieces are regrouped: the script's collate function then runs in the main process.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from memfit._errors import UsageError
from memfit.batches.pieces import part_of
from memfit.batches.samples import SampleBatch
from memfit.loading.common import CommonDraws
from memfit.loading.draws import Order, Stream, keeps_own_order, mixed, peek_seed, seeded, spend_seed
from memfit.loading.packing import PackingCollate, keep
from memfit.loading.parts import Part, counts_of, over_all
from memfit.loading.pieces import Counted, CountingCollate, Grouping, Regrouped, as_counted
from memfit.loading.shares import Shares
from memfit.ranks.ranks import Ranks


@dataclass(frozen=True)
class BatchInfo:
    """One batch a loader is about to yield."""

    epoch: int
    """Epochs begun before this one, by this loader."""
    index: int
    """Batches yielded before this one in its epoch."""
    samples: int | None
    """Samples in it; None where unknown: the dataset yields whole batches, or a DataLoader subclass its own things."""
    waited: float
    """Time the consumer waited for it, in seconds."""


class EffectiveLoader(DataLoader[Any]):
    """`source`, yielding effective batches of `share` samples (None: the script's own batches).

    With `collated` they are what the script's collate function makes of them, else `SampleBatch`es. Datasets that
    yield whole batches (`batch_size=None`) are passed through. Batches of a batch sampler of the script's are never
    split: whole ones are taken until `share` samples are there. `seed` determines the order of all epochs but the
    first; None takes it from the generator as the first epoch finds it. With `apart`, that is only so once `apart()`: as long
    as nothing was drawn that the script alone would not have, the order is the plain loader's. `on_batch` is called before
    each batch. With `ranks`, `share` counts over all processes, and this one yields its part; the order is then rank 0's.

    Everything else is the script's loader: same dataset, sampler, workers, attributes. Raises UsageError for a share
    that is not positive and, while iterating, if pieces cannot be regrouped. Errors of the dataset and of the collate
    function surface as themselves.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        *,
        share: int | None,
        collated: bool,
        on_batch: Callable[[BatchInfo], None] | None = None,
        seed: int | None = None,
        apart: Callable[[], bool] | None = None,
        ranks: Ranks | None = None,
        tell: Callable[[str], None] = lambda message: None,
    ) -> None:
        _check_share(share)
        source = source.source if isinstance(source, EffectiveLoader) else source
        # Not DataLoader.__init__: what the script's loader already is, in whatever torch version or subclass, is taken
        # over attribute by attribute rather than built, checked and warned about a second time.
        self.__dict__.update(vars(source), _iterator=None)
        self.source = source
        self._share = share
        self._collated = collated
        self._on_batch = on_batch
        self._seed, self._apart = seed, apart if seed is None else None
        self._epochs = 0
        self._latest: BatchInfo | None = None
        self._pins = source.pin_memory and _pinning_works()
        self._grouping = _grouping(source, share, collated)
        self._drawn = None if ranks is None or share is None else CommonDraws(ranks, tell)
        self._division = None
        if self._drawn is not None and self._grouping is not None:
            self._division = self._drawn.division(source, self._grouping, never_empty=collated)
            if self._division is None:
                share = self._share = part_of(share, ranks.rank, ranks.size)  # type: ignore[arg-type, union-attr]
                self._grouping = _grouping(source, share, collated)
        part = None if self._division is None else partial(Part, division=self._division, differ=self._drawn.differ)  # type: ignore[union-attr]
        self._inner, self._order = _inner_loader(source, self._grouping, pins=self._pins, part=part)
        if share is not None and self._grouping is not None and not self._grouping.whole:
            # torch guards this attribute because changing it usually has no effect; here it tells what is yielded.
            self.__dict__["batch_size"] = share

    @property
    def seed(self) -> int | None:
        """What the order of all epochs but the first is derived from; None until the first has begun."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the latest batch, from 0."""
        return self._latest.epoch if self._latest else 0

    @property
    def index(self) -> int:
        """The latest batch within its epoch, from 0; -1 before the first batch."""
        return self._latest.index if self._latest else -1

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        if self._drawn is not None and self.shares is not None:
            self._drawn.begin_shares(self.shares)
        epoch = self._epochs
        seed = peek_seed(self.generator) if self._seed is None else self._seed
        apart = bool(epoch) and (self._apart is None or self._apart())
        if self._drawn is not None:
            seeds = not self._keeps_workers()
            seed, apart = self._drawn.begin(seed, apart, self._order, self.generator, seeds_workers=seeds)
        self._seed = seed
        if apart:
            self._draw_apart(epoch, seed)
        pieces = iter(self._inner)
        self._epochs += 1
        return _Epoch(self, epoch, self._batches(pieces, epoch))

    @property
    def shares(self) -> Shares | None:
        """Which part of an effective batch is whose; None where that is not this loader's to say."""
        return None if self._division is None else self._division.shares

    def __len__(self) -> int:
        """Iterations of this loader; an estimate where batches of a batch sampler of varying size are joined."""
        if self._grouping is None or self._share is None:
            return len(self._inner)
        if self._division is not None:
            return self._division.batches(self._samples())
        return _iterations(self.source, self._grouping)

    def __getattr__(self, name: str) -> Any:
        # Methods and properties of a DataLoader subclass of the script's.
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["source"], name)

    def _samples(self) -> int:
        """Samples in an epoch over all processes."""
        return len(over_all(self.source.batch_sampler.sampler))  # type: ignore[union-attr]

    def _announce(self, info: BatchInfo) -> None:
        """Take note of the batch that is yielded next."""
        self._latest = info
        if self._on_batch is not None:
            self._on_batch(info)

    def _draw_apart(self, epoch: int, seed: int) -> None:
        if self.generator is None:  # where torch draws the workers' seeds from
            if not self._keeps_workers():
                spend_seed()
            self._inner.generator = torch.Generator().manual_seed(mixed(seed, epoch, 0, *self._rank()))
        if not keeps_own_order(self._order.sampler):
            self._order.stream = Stream(mixed(seed, epoch, 1))

    def _keeps_workers(self) -> bool:
        """Whether workers of an earlier epoch stay, with the seeds they have."""
        return self.persistent_workers and self._inner._iterator is not None

    def _batches(self, pieces: Iterator[Any], epoch: int) -> Iterator[Counted]:
        # `map`, not generators: after an error of the dataset's the script may go on with the next batch.
        if self._grouping is None:
            return map(as_counted, pieces)
        finish = self._collate if self._collated else self._leave_uncollated
        counts = None if self._division is None else counts_of(self._division, self._samples())
        batches = Regrouped(pieces, self._grouping, partial(finish, epoch), counts)
        return map(_pinned, batches) if self._collated and self._pins else batches

    def _collate(self, epoch: int, index: int, samples: Sequence[Any]) -> Any:
        with self._drawing(epoch, index, 0):
            return self.collate_fn(list(samples))

    def _leave_uncollated(self, epoch: int, index: int, samples: Sequence[Any]) -> SampleBatch:
        collate_fn = partial(_collate_and_pin, self.collate_fn) if self._pins else self.collate_fn
        return SampleBatch(samples, collate_fn, drawing=partial(self._drawing, epoch, index))

    def _drawing(self, epoch: int, index: int, first: int) -> AbstractContextManager[None]:
        if self.num_workers == 0 or self._seed is None:
            return nullcontext()
        # A collate function that draws (random masking) did so in a worker, not from this process's generators.
        return seeded(mixed(self._seed, epoch, 2, index, first, *self._rank()))

    def _rank(self) -> tuple[int, ...]:
        """What tells this process's draws from those of others."""
        return () if self._drawn is None else (self._drawn.ranks.rank,)


class _Epoch(Iterator[Any]):
    """One pass over the loader's batches, announcing each."""

    def __init__(self, loader: EffectiveLoader, epoch: int, batches: Iterator[Counted]) -> None:
        self._loader = loader
        self._epoch = epoch
        self._batches = batches
        self._index = -1

    def __next__(self) -> Any:
        started = time.perf_counter()
        samples, batch = next(self._batches)
        self._index += 1
        self._loader._announce(BatchInfo(self._epoch, self._index, samples, time.perf_counter() - started))
        return batch

    def __len__(self) -> int:
        return len(self._loader)


def _check_share(share: int | None) -> None:
    if share is not None and share < 1:
        raise UsageError(
            f"effective batches of {share} samples on this rank",
            found="an effective batch holds at least one sample",
            next_move="ask for a target batch of at least the number of processes",
        )


def _grouping(source: DataLoader[Any], share: int | None, collated: bool) -> Grouping | None:
    """How pieces become effective batches; None if the script's own batches are passed on as they are."""
    sampler = source.batch_sampler
    if sampler is None or (share is None and collated):
        return None
    if share is None:
        return Grouping(1, whole=True)
    if type(sampler) is BatchSampler:
        return Grouping(share, drop_last=sampler.drop_last)
    return Grouping(share, whole=True)


def _inner_loader(
    source: DataLoader[Any], grouping: Grouping | None, *, pins: bool, part: Callable[[Any], Part] | None = None
) -> tuple[DataLoader[Any], Order]:
    """The script's loader once more, of its own class: its order now ours to steer, its collate function replaced, and with
    `part` only this process's indices."""
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
    order = Order(sampler)
    changes["sampler" if source.batch_sampler is None else "batch_sampler"] = order
    inner = copy.copy(source)
    inner.__dict__.update(changes)
    return inner, order


def _iterations(source: DataLoader[Any], grouping: Grouping) -> int:
    sampler: Any = source.batch_sampler
    if grouping.whole:
        batches = len(sampler)
        size = getattr(sampler, "batch_size", None) or len(source.dataset) / max(batches, 1)  # type: ignore[arg-type]
        return _quotient(batches, _quotient(grouping.size, size))
    samples = len(source.dataset if isinstance(source.dataset, IterableDataset) else sampler.sampler)  # type: ignore[arg-type]
    return samples // grouping.size if grouping.drop_last else _quotient(samples, grouping.size)


def leftover(source: Any, share: int | None) -> int | None:
    """Samples in the last, smaller effective batch of an epoch (0: there is none); None where that is not known."""
    sampler = source.batch_sampler if isinstance(source, DataLoader) else None
    if type(sampler) is not BatchSampler or isinstance(source.dataset, IterableDataset):
        return None
    try:
        return 0 if sampler.drop_last else len(sampler.sampler) % (share or sampler.batch_size)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _quotient(total: float, size: float) -> int:
    return int(-(-total // size))


def _pinning_works() -> bool:
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return torch.cuda.is_available()
    device = torch.accelerator.current_accelerator()
    return device is not None and torch.accelerator.is_available() and device.type != "mps"  # torch cannot pin for mps


def _pinned(counted: Counted) -> Counted:
    return counted._replace(batch=pinned(counted.batch))


def _collate_and_pin(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return pinned(collate_fn(samples))
