"""Makes the script's DataLoader yield effective batches: one iteration is one optimizer step.

The loading itself stays the script's: its sampler, its batches, its workers. Workers send the samples of each script
batch, called a *piece*, packed instead of collated. The main process regroups pieces into effective batches and
collates those. So workers never hold more than the script's own batches in shared memory, and the first piece arrives
as early as without memfit. Not covered: prefetching further ahead than the script does (that would take memory), and
collating in workers once pieces are regrouped: the script's collate function then runs in the main process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.batches.loaded_batch import LoadedBatch
from memfit.batches.pieces import part_of
from memfit.batches.samples import SampleBatch
from memfit.engine.random_state import HostRandom
from memfit.loading.common import CommonDraws
from memfit.loading.draws import Stream, generator_of, keeps_own_order, mixed, peek_seed, seeded, spend_seed
from memfit.loading.inner import check_positive, grouping_of, inner_loader, iterations
from memfit.loading.parts import RankSampler, counts_of, over_all
from memfit.loading.pieces import Counted, Regrouped, as_counted
from memfit.loading.pinning import collate_and_pin, pinning_works, with_pinned
from memfit.loading.position import LoaderPosition, Passage, Start, without_groups, without_items, without_samples
from memfit.loading.shares import Shares
from memfit.loading.watch import Watch
from memfit.ranks.ranks import Ranks


@dataclass(frozen=True)
class BatchInfo:
    """Describes one batch that a loader is about to yield."""

    epoch: int
    """Epochs that this loader began before this one."""
    index: int
    """Batches yielded before this one in its epoch."""
    samples: int | None
    """Samples in it; None if unknown: the dataset yields whole batches, or a DataLoader subclass its own objects."""
    waited: float
    """Seconds that the consumer waited for it."""


class EffectiveLoader(DataLoader[Any]):
    """Yields effective batches of `share` samples from `source` (None: the script's own batches).

    With `collated`, they are what the script's collate function returns, else `LoadedBatch`es. Datasets that yield
    whole batches (`batch_size=None`) pass through. Batches of the script's own batch sampler are never split: whole
    ones are joined until they hold `share` samples. `seed` determines the order of all epochs after the first; None
    takes it from the generator as the first epoch finds it. With `apart`, this applies only once `apart()` is true: as long
    as nothing is drawn that the script alone would not draw, the order is the plain loader's. `on_batch` is called before
    each batch. With `ranks`, `share` counts over all ranks, this rank yields its part, and the order is rank 0's.

    Everything else is the script's loader: same dataset, sampler, workers, attributes. Raises UsageError for a share
    that is not positive and, while iterating, if pieces cannot be regrouped. Errors from the dataset and the collate
    function pass through.
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
        check_positive(share)
        source = source.source if isinstance(source, EffectiveLoader) else source
        # Not DataLoader.__init__: copied attributes hold for any torch version or subclass, without a second round of
        # checks and warnings.
        self.__dict__.update(vars(source), _iterator=None)
        self.source = source
        self._size = self._share = share
        self._collated = collated
        self._on_batch = on_batch
        self._seed, self._apart = seed, apart if seed is None else None
        self._epochs = 0
        self._latest: BatchInfo | None = None
        self._watch = Watch()
        self._passage: Passage | None = None
        self._resumed: LoaderPosition | None = None
        self._skipped = 0
        self._pins = source.pin_memory and pinning_works()
        self._grouping = grouping_of(source, share, collated)
        self._processes = 1 if ranks is None else ranks.size
        self._drawn = None if ranks is None or share is None else CommonDraws(ranks, tell)
        self._division = None
        if self._drawn is not None and self._grouping is not None:
            self._division = self._drawn.division(source, self._grouping, never_empty=collated)
            if self._division is None:
                share = self._share = part_of(share, ranks.rank, ranks.size)  # type: ignore[arg-type, union-attr]
                self._grouping = grouping_of(source, share, collated)
        part = None if self._division is None else partial(RankSampler, division=self._division, differ=self._drawn.differ)  # type: ignore[union-attr]
        self._inner, self._order = inner_loader(source, self._grouping, self._watch, pins=self._pins, part=part)
        indices = getattr(self._order.sampler, "sampler", None)
        self._part = indices if isinstance(indices, RankSampler) else None
        if share is not None and self._grouping is not None and not self._grouping.whole:
            # torch guards this attribute because changing it usually has no effect; here it says what is yielded.
            self.__dict__["batch_size"] = share

    @property
    def seed(self) -> int | None:
        """The seed of the order of all epochs after the first; None until the first epoch begins."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the latest batch, from 0."""
        return self._latest.epoch if self._latest else 0

    @property
    def index(self) -> int:
        """The index of the latest batch within its epoch, from 0; -1 before the first batch."""
        return self._latest.index if self._latest else -1

    @property
    def drew(self) -> bool:
        """Whether anything else drew from torch's CPU generator during an epoch."""
        return self._watch.drew

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        if self._drawn is not None and self.shares is not None:
            self._drawn.begin_shares(self.shares)
        self._watch.look()  # in case the last epoch was left early
        epoch, resumed, self._resumed = self._epochs, self._resumed, None
        self._order.stream, self._order.spends = None, True
        self._inner.generator = self.generator
        if resumed is None or resumed.start is None:  # between epochs
            passage, self._skipped = Passage(epoch, self._begin(epoch), self._skipped), 0
        else:
            passage = Passage(epoch, self._begin_again(resumed, resumed.start), resumed.index)
        self._order.skips = self._skipping(passage.index) if passage.index else None
        (self._part or self._order).through = passage.first.through
        pieces = iter(self._inner)
        self._watch.mark()
        self._epochs, self._passage = epoch + 1, passage
        return _Epoch(self, passage, self._batches(pieces, passage), pieces, () if resumed is None else resumed.first)

    @property
    def shares(self) -> Shares | None:
        """Which part of an effective batch each rank has; None if this loader does not divide batches."""
        return None if self._division is None else self._division.shares

    def __len__(self) -> int:
        """The number of iterations; an estimate if joined batches of a batch sampler vary in size."""
        if self._grouping is None or self._share is None:
            return len(self._inner)
        if self._division is not None:
            return self._division.batches(self._samples())
        return iterations(self.source, self._grouping)

    def __getattr__(self, name: str) -> Any:
        # Methods and properties of the script's DataLoader subclass.
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["source"], name)

    def _samples(self) -> int:
        """Samples in an epoch over all ranks."""
        return len(over_all(self.source.batch_sampler.sampler))  # type: ignore[union-attr]

    def _announce(self, info: BatchInfo) -> None:
        """Record the batch that is yielded next."""
        self._latest = info
        if self._on_batch is not None:
            self._on_batch(info)

    # ---- resuming

    def position(self, drew: bool, back: int = 0) -> LoaderPosition:
        """Return where it stands, `back` batches before the next. `drew`: whether later epochs draw from derived streams."""
        passage = self._passage
        if passage is None or passage.ended:
            resumed = self._resumed
            if resumed is not None:
                return resumed
            epoch, index, start, first = self._epochs, 0, None, ()
        else:
            epoch, index, start = passage.epoch, max(0, passage.index - back), passage.start
            first = tuple(passage.first.seen)
        own = None if start is not None else generator_of(self._order.sampler) or self.generator
        return LoaderPosition(
            epoch=epoch,
            index=index,
            size=self._together(),
            samples=self._known_samples(),
            parts=self._parts(),
            seed=self._seed,
            drew=drew,
            own=None if own is None else own.get_state(),
            start=start,
            first=first,
        )

    def begin_at(self, index: int) -> bool:
        """Make the next iteration begin with batch `index` of its epoch, counted from the epoch's beginning even if it resumes
        one. Batches before it are not loaded. Return False if that is not possible."""
        if self._unskippable() is not None:
            return False
        if self._resumed is None:
            self._skipped = index
        else:
            self._resumed = replace(self._resumed, index=index)
        return True

    def lost(self, position: LoaderPosition) -> str | None:
        """Return why the next iteration cannot resume at `position`; None if it can."""
        why = self._unskippable()
        if why is not None:
            return why
        if position.parts != self._parts():
            return f"its sampler has batches of its own on each process, and there were {position.parts or 1} of them"
        return None

    def misplaced(self, position: LoaderPosition) -> tuple[str, str] | None:
        """Return how `position` differs from this loader, as (there, here); None if it matches."""
        return position.misplaced(self._together(), self._known_samples(), lambda: len(self))

    def go_to(self, position: LoaderPosition) -> None:
        """Make the next iteration resume at `position`, or begin its epoch if the place in it is lost."""
        resumes = self.lost(position) is None and position.start is not None
        self._seed, self._watch.drew = position.seed, position.drew or self._watch.drew
        self._epochs, self._passage = position.epoch, None
        self._resumed = position if resumes else None
        self._latest = BatchInfo(position.epoch, (position.index if resumes else 0) - 1, None, 0.0)
        own = generator_of(self._order.sampler) or self.generator
        if own is not None and position.own is not None:
            own.set_state(position.own)

    def _unskippable(self) -> str | None:
        """Why batches cannot be skipped without loading them; None if they can."""
        if isinstance(self.dataset, IterableDataset):
            return "an IterableDataset has no indices, so nothing can be skipped unloaded"
        if type(self.source).__iter__ is not DataLoader.__iter__:
            return f"{type(self.source).__name__} has an __iter__ of its own"
        return None

    def _together(self) -> int | None:
        """Samples of an effective batch over all ranks."""
        batch_size = self.source.batch_size
        if self._size is not None or batch_size is None:
            return self._size
        return batch_size * (self._parts() or 1)

    def _parts(self) -> int | None:
        return None if self._division is not None or self._processes == 1 else self._processes

    def _known_samples(self) -> int | None:
        try:
            return len(self.dataset) if self.batch_sampler is None else self._samples()  # type: ignore[arg-type]
        except (AttributeError, TypeError, NotImplementedError):
            return None

    def _begin(self, epoch: int) -> Start:
        """Begin an epoch: set and return what its order is drawn from."""
        seed = peek_seed(self.generator) if self._seed is None else self._seed
        apart = bool(epoch) and (self._apart is None or self._apart())
        start = Start.now(seed, apart, self._order, self.generator, seeds_workers=not self._keeps_workers())
        if self._drawn is not None:
            start = self._drawn.begin(start, self._order, self.generator)
        self._seed = start.seed
        if start.apart:
            if self.generator is None and not self._keeps_workers():
                spend_seed()
            self._draw_apart(epoch, start.seed)
        return start

    def _begin_again(self, position: LoaderPosition, start: Start) -> Start:
        """The same for an interrupted epoch, for which the global generator already gave its draws."""
        order, epoch = self._order, position.epoch
        own = generator_of(order.sampler) or self.generator
        if own is not None and start.own is not None:
            own.set_state(start.own)
        order.spends = False
        order.stream = Stream(state=start.state, host=start.host)
        if start.apart:
            self._draw_apart(epoch, start.seed, position.index, host=start.host)
        elif self.generator is None:
            self._seed_workers(start.seed, epoch, position.index)
        return start

    def _skipping(self, index: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """How the first batches of an epoch are skipped in its order."""
        grouping = self._grouping
        if grouping is None:
            return partial(without_items, count=index)
        if grouping.whole:
            return partial(without_groups, size=grouping.size, count=index)
        if self._division is None:
            return partial(without_samples, count=index * grouping.size)
        samples = self._samples()
        return partial(without_samples, count=sum(self._division.taken(i, samples) for i in range(index)))

    def _draw_apart(self, epoch: int, seed: int, *resumed: int, host: HostRandom | None = None) -> None:
        if self.generator is None:
            self._seed_workers(seed, epoch, *resumed)
        if not keeps_own_order(self._order.sampler):
            self._order.stream = Stream(mixed(seed, epoch, 1), host=host)

    def _seed_workers(self, seed: int, epoch: int, *resumed: int) -> None:
        """Make torch draw the workers' seeds from a derived stream; a resumed epoch, whose beginning used it, gets another."""
        self._inner.generator = torch.Generator().manual_seed(mixed(seed, epoch, 0, *self._rank(), *resumed))

    def _keeps_workers(self) -> bool:
        """Whether workers of an earlier epoch persist, with their seeds."""
        return self.persistent_workers and self._inner._iterator is not None

    def _batches(self, pieces: Iterator[Any], passage: Passage) -> Iterator[Counted]:
        # `map`, not generators: after an error in the dataset, the script may continue with the next batch.
        if self._grouping is None:
            return map(as_counted, pieces)
        finish = self._collate if self._collated else self._leave_uncollated
        counts = None if self._division is None else counts_of(self._division, self._samples(), passage.index)
        batches = Regrouped(pieces, self._grouping, partial(finish, passage.epoch), counts, passage.index)
        return map(with_pinned, batches) if self._collated and self._pins else batches

    def _collate(self, epoch: int, index: int, samples: Sequence[Any]) -> Any:
        with self._drawing(epoch, index, 0):
            return self.collate_fn(list(samples))

    def _leave_uncollated(self, epoch: int, index: int, samples: Sequence[Any]) -> LoadedBatch:
        collate_fn = partial(collate_and_pin, self.collate_fn) if self._pins else self.collate_fn
        return LoadedBatch(SampleBatch(samples, collate_fn, drawing=partial(self._drawing, epoch, index)))

    def _drawing(self, epoch: int, index: int, first: int) -> AbstractContextManager[None]:
        if self.num_workers == 0 or self._seed is None:
            return nullcontext()
        # The script's own loader runs a collate function that draws (random masking) in a worker, not on this generator.
        return seeded(mixed(self._seed, epoch, 2, index, first, *self._rank()))

    def _rank(self) -> tuple[int, ...]:
        """What separates this rank's draws from those of others."""
        return () if self._drawn is None else (self._drawn.ranks.rank,)


class _Epoch(Iterator[Any]):
    """Iterates once over the loader's batches, made of `pieces`, and announces each. `first`: hashes of a resumed order's first
    indices, to recognize it."""

    def __init__(
        self,
        loader: EffectiveLoader,
        passage: Passage,
        batches: Iterator[Counted],
        pieces: Iterator[Any],
        first: tuple[str, ...],
    ) -> None:
        self._loader, self._passage, self._batches, self._pieces = loader, passage, batches, pieces
        self._first, self._skips = first, passage.index > 0

    def __next__(self) -> Any:
        loader, passage = self._loader, self._passage
        loader._watch.look()
        started = time.perf_counter()
        try:
            samples, batch = next(self._batches)
        except StopIteration:
            self._end()
            raise
        self._check_order()
        loader._watch.look()
        loader._watch.mark()
        passage.index += 1
        loader._passage = passage
        loader._announce(BatchInfo(passage.epoch, passage.index - 1, samples, time.perf_counter() - started))
        return batch

    def _end(self) -> None:
        if self._skips and not self._passage.first.seen:
            next(self._pieces, None)  # no batch is left, but the order still has to be drawn
        self._check_order()
        self._passage.ended, self._pieces = True, iter(())
        self._loader._watch.rest()

    def _check_order(self) -> None:
        self._passage.check_order(self._first)
        self._first = ()

    def __len__(self) -> int:
        return len(self._loader) - self._passage.index
