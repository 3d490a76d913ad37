"""Orders an effective batch for step mode: samples by descending size, collated per piece, or an ordinary batch to be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memfit.batches.cut import Layout, cut, cut_samples, pieces_of
from memfit.batches.extents import Extent, of_those_after, together
from memfit.batches.pieces import bounds
from memfit.batches.samples import SampleBatch
from memfit.batches.shapes import Shapes
from memfit.batches.split import Split, part_of_split
from memfit.batches.tree import map_tensors, tensors
from memfit.capture.infer_layout import twins_of
from memfit.engine.weighting import WeightsChanged
from memfit.equivalence.proof_samples import Marks, entries_of, marks_of, most_telling, pairs_in, spaced

RAGGED = 1.05
"""Samples are ordered by size if their sizes differ by more than this factor."""


class Ordered:
    """The samples of an effective batch, in the order in which micro-batches are made from them.

    `extents[i]` is the maximum over the i-th and later samples for each tensor, `sizes[i]` its elements; all zero if samples
    cannot be told apart. `shapes` are the shapes per sample of an ordinary batch, None if samples are collated. With
    `in_order`, pieces must be contiguous. `views(pieces)` makes all pieces if no copy is needed. `devices` hold the samples, if
    known. `again` makes a new batch from a part of an ordinary batch and its number of samples. `wanted` are an ordinary
    batch's tensors that receive gradients. `nbytes()` counts the bytes of samples not collated yet. `tree` is an ordinary
    batch.
    """

    def __init__(
        self,
        samples: int,
        extents: Sequence[Extent],
        piece: Callable[[Sequence[int]], Any],
        *,
        shapes: Shapes | None = None,
        in_order: bool = False,
        views: Callable[[Sequence[int]], Sequence[Any]] | None = None,
        devices: frozenset[torch.device] | None = None,
        again: Callable[[Any, int], Ordered] | None = None,
        wanted: Sequence[torch.Tensor] = (),
        nbytes: Callable[[], int] = int,
        by_size: bool = True,
        tree: Any = None,
    ) -> None:
        self.nbytes, self.tree = nbytes, tree
        self.samples, self.shapes, self.in_order, self._again = samples, shapes, in_order, again
        self.wanted = wanted
        self.devices = devices
        sizes = [sum(extent) for extent in extents]
        self.ragged = bool(sizes) and sum(together(extents)) > RAGGED * max(1, min(sizes))
        order = sorted(range(samples), key=lambda i: -sizes[i]) if self.ragged and by_size else range(samples)
        self._order = order
        self._chosen: Sequence[int] = ()
        self._own = [extents[i] for i in order] if sizes else [()] * samples
        self.extents = of_those_after(self._own) if sizes else self._own
        self.sizes = [sum(extent) for extent in self.extents]
        self._make = piece
        self._views = views
        self._ready: dict[tuple[int, int], Any] = {}

    @staticmethod
    def of_samples(batch: SampleBatch, *, by_size: bool = True) -> Ordered:
        """Creates a batch of samples that are collated per piece; without `by_size` in their original order."""
        batch = batch.without_gaps()
        return Ordered(len(batch), batch.extents(), batch.collate, nbytes=batch.nbytes, by_size=by_size)

    @staticmethod
    def of_tree(tree: Any, layout: Layout, shapes: Shapes) -> Ordered:
        """Creates a batch from an ordinary batch that is cut."""

        views = partial(pieces_of, tree, layout) if all(axis is None or axis.outer == 1 for axis in layout.axes) else None

        def piece(indices: Sequence[int]) -> Any:
            start, stop = indices[0], indices[-1] + 1
            if indices == range(start, stop) or list(indices) == list(range(start, stop)):
                return cut(tree, layout, start, stop)
            return cut_samples(tree, layout, indices)

        def again(part: Any, samples: int) -> Ordered:
            return Ordered.of_tree(part, Layout(layout.axes, samples), shapes)

        found = tensors(tree)
        devices = frozenset([tensor.device for tensor in found])
        wanted = [tensor for tensor in found if tensor.requires_grad]
        return Ordered(
            layout.samples, [], piece,
            shapes=shapes, views=views, devices=devices, again=again, wanted=wanted, tree=tree,
        )  # fmt: skip

    @staticmethod
    def of_split(tree: Any, samples: int, split: Split, shapes: Shapes) -> Ordered:
        """Creates a batch from an ordinary batch that only `split` can cut."""

        def piece(indices: Sequence[int]) -> Any:
            return part_of_split(split, tree, indices[0], indices[-1] + 1, samples)

        def again(part: Any, samples: int) -> Ordered:
            return Ordered.of_split(part, samples, split, shapes)

        wanted = [tensor for tensor in tensors(tree) if tensor.requires_grad]
        return Ordered(samples, [], piece, shapes=shapes, in_order=True, again=again, wanted=wanted)

    def few(self, count: int) -> Ordered:
        """Returns `count` samples of all sizes, unsorted. Those of an ordinary batch are copied to the host."""
        count = min(count, self.samples)
        step = max(1, self.samples // count) if self.ragged else 1
        chosen = [self._order[i * step] for i in range(count)]
        if self._again is not None:  # a view would keep the whole batch alive
            return self._again(map_tensors(_on_host, self._make(chosen)), count)
        return self._with_order([chosen[i] for i in _mixed_up(count)])

    def backwards(self, count: int) -> Ordered:
        """Returns the first `count` samples in reverse order."""
        return self._with_order(self._order[:count][::-1])

    @property
    def is_whole(self) -> bool:
        """Whether it is an ordinary batch, whose pieces are views of it."""
        return self._views is not None

    @property
    def largest(self) -> int:
        """Elements of the largest sample, with each tensor at its maximum."""
        return max(self.sizes, default=0)

    @property
    def available(self) -> int | None:
        """Number of samples that `copies` can make; None: any number."""
        return self.samples if self.in_order else None

    def load(self, pieces: Sequence[int]) -> tuple[Shapes | None, int]:
        """Returns (the shapes that samples share, the maximum load of these micro-batches in elements, or samples)."""
        return self.shapes, max((n * max(1, self.sizes[start]) for n, (start, _) in zip(pieces, bounds(pieces))), default=0)

    def cut_at(self, pieces: Sequence[int]) -> None:
        """Cuts all pieces at once if they are views, in a fraction of the time that it takes one by one."""
        self._ready = {} if self._views is None else dict(zip(bounds(pieces), self._views(pieces)))

    def piece(self, start: int, stop: int) -> Any:
        """Returns the samples `start:stop` in this order, collated or cut."""
        ready = self._ready.pop((start, stop), None)
        return self._make(self._order[start:stop]) if ready is None else ready

    def copies(self, index: int, count: int) -> Any:
        """Returns `count` samples like the `index`-th. Ragged samples repeat it, with later ones that are larger in some
        tensor; else it is the first samples."""
        if self.ragged:
            chosen = self._largest_from(index)
            return self._make([self._order[chosen[i % len(chosen)]] for i in range(count)])
        return self._make([self._order[i % self.samples] for i in range(count)])

    def _largest_from(self, index: int) -> list[int]:
        """Return the `index`-th sample, and one later sample for each tensor in which another is larger."""
        missing = [k for k, (own, most) in enumerate(zip(self._own[index], self.extents[index])) if own < most]
        after = range(index, self.samples)
        return list(dict.fromkeys((index, *(max(after, key=lambda i: self._own[i][k]) for k in missing))))

    def around(self, index: int) -> Callable[[int, int], Any]:
        """Returns a maker of pieces for timing, from samples of about the `index`-th's size in rotation."""
        span = max(1, self.samples // 4) if self.ragged else self.samples
        start = max(0, min(index - span // 2, self.samples - span))
        return lambda low, high: self._make([self._order[start + i % span] for i in range(low, high)])

    def twins(self, index: int, count: int, twin: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Returns `copies` as fake tensors."""
        return twins_of(self.copies(index, count), twin)

    def alike(self, count: int) -> Any:
        """Returns `count` copies of the largest sample."""
        return self._make([self._order[0]] * count)

    def spread(
        self,
        parts: Sequence[int],
        rivals: Sequence[Callable[[Any], Any]] = (),
        own: Callable[[Any], Any] | None = None,
        marks_of: Callable[[Any], Marks] = marks_of,
    ) -> Callable[[int, int], Any]:
        """Returns samples for proofs, in two parts of these sizes. They differ as much as possible in what a loss may count, as
        `marks_of` a sample says, or with `rivals` in these counts relative to `own`."""
        count = sum(parts)
        if rivals and not self.in_order:

            def apart(i: int) -> list[float]:
                sample = self._make([i])
                whole = 1 if own is None else max(1.0, _counted(own, sample))
                return [_counted(rival, sample) / whole for rival in rivals]

            order = sorted(self._order, key=apart)
            chosen = [*order[: count // 2], *order[count // 2 - count :]]
        elif self.in_order:
            chosen = self._order[:count]
        else:
            looked_at = spaced(self.samples, pairs_in(entries_of(self.tree, self.samples)).values())
            there = [self._order[i] for i in looked_at]
            marks = [marks_of(self._make([i])) for i in there]
            if self.ragged:
                marks = [{**mark, "size": float(sum(self._own[i]))} for mark, i in zip(marks, looked_at)]
            chosen = [there[i] for i in most_telling(marks, parts)]
        self._chosen = chosen
        return lambda low, high: self._make(chosen[low:high])

    def others(self, count: int) -> Callable[[int, int], Any]:
        """Returns samples for one more proof, other ones than `spread` chose last as far as there are others."""
        before = set(self._chosen)
        others = [i for i in self._order if i not in before]
        if len(others) > count:  # over all of the batch, also its last
            others = [others[i * (len(others) - 1) // (count - 1)] for i in range(count)]
        self._chosen = chosen = [*others, *self._chosen][:count]
        return lambda low, high: self._make(chosen[low:high])

    def twice(self, start: int, stop: int) -> Callable[[int, int], Any]:
        """Returns the samples `start:stop` of those chosen last for a proof, twice."""
        chosen = [*self._chosen[start:stop]] * 2
        return lambda low, high: self._make(chosen[low:high])

    def _with_order(self, order: Sequence[int]) -> Ordered:
        """Return a view of the samples in this order."""
        view = Ordered(0, [], self._make, shapes=self.shapes, in_order=self.in_order, again=self._again)
        view.samples, view._order, view.ragged = len(order), order, self.ragged
        view.sizes, view._own = [0] * len(order), [()] * len(order)
        view.extents = view._own
        return view


def _counted(count: Callable[[Any], Any], sample: Any) -> float:
    """Count one sample; -1 if what it holds can no longer be counted."""
    try:
        return float(count(sample))
    except WeightsChanged:
        return -1.0


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _mixed_up(count: int) -> list[int]:
    """Return 0..count-1 with neighbours far apart, so that contiguous parts are alike."""
    return [i for start in range(4) for i in range(start, count, 4)]
