"""An effective batch as step mode cuts it: samples in descending size, collated piece by piece; or an ordinary batch, cut."""

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
from memfit.batches.tree import map_leaves, tensors
from memfit.engine.accumulate import WeightsChanged
from memfit.training.call import Split, part_of_split
from memfit.training.choose import marks_of, most_telling, spaced
from memfit.training.learn import twins_of

RAGGED = 1.05
"""Samples whose sizes differ by more than this factor are ordered by size."""


class Ordered:
    """Samples in the order in which micro-batches are made of them.

    `extents[i]` is the most that the i-th and those after it have in each tensor, `sizes[i]` the elements of that; all zero
    where samples cannot be told apart. `shapes` are the shapes per sample of an ordinary batch, None where samples are
    collated. With `in_order`, pieces can only be made of neighbours;
    `views(pieces)` makes all of them where that copies nothing. They lie on `devices`, if known.
    `again` makes of a part of an ordinary batch, and the number of samples in it, a batch of its own. `wanted` are the tensors
    of an ordinary batch that gradients flow into. `nbytes()` counts the bytes of samples that are not collated yet.
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
    ) -> None:
        self.nbytes = nbytes
        self.samples, self.shapes, self.in_order, self._again = samples, shapes, in_order, again
        self.wanted = wanted
        self.devices = devices
        sizes = [sum(extent) for extent in extents]
        self.ragged = bool(sizes) and sum(together(extents)) > RAGGED * max(1, min(sizes))
        order = sorted(range(samples), key=lambda i: -sizes[i]) if self.ragged and by_size else range(samples)
        self._order = order
        self._own = [extents[i] for i in order] if sizes else [()] * samples
        self.extents = of_those_after(self._own) if sizes else self._own
        self.sizes = [sum(extent) for extent in self.extents]
        self._make = piece
        self._views = views
        self._ready: dict[tuple[int, int], Any] = {}

    @staticmethod
    def of_samples(batch: SampleBatch, *, by_size: bool = True) -> Ordered:
        """Samples that are collated piece by piece; without `by_size` in the order that they came in."""
        batch = batch.without_gaps()
        return Ordered(len(batch), batch.extents(), batch.collate, nbytes=batch.nbytes, by_size=by_size)

    @staticmethod
    def of_tree(tree: Any, layout: Layout, shapes: Shapes) -> Ordered:
        """An ordinary batch that is cut."""

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
        return Ordered(layout.samples, [], piece, shapes=shapes, views=views, devices=devices, again=again, wanted=wanted)

    @staticmethod
    def of_split(tree: Any, samples: int, split: Split, shapes: Shapes) -> Ordered:
        """An ordinary batch that only `split` knows how to cut."""

        def piece(indices: Sequence[int]) -> Any:
            return part_of_split(split, tree, indices[0], indices[-1] + 1, samples)

        def again(part: Any, samples: int) -> Ordered:
            return Ordered.of_split(part, samples, split, shapes)

        wanted = [tensor for tensor in tensors(tree) if tensor.requires_grad]
        return Ordered(samples, [], piece, shapes=shapes, in_order=True, again=again, wanted=wanted)

    def few(self, count: int) -> Ordered:
        """Some of the samples, of all sizes, in no particular order of size; those of an ordinary batch as copies."""
        count = min(count, self.samples)
        step = max(1, self.samples // count) if self.ragged else 1
        chosen = [self._order[i * step] for i in range(count)]
        if self._again is not None:  # not to keep the whole batch alive
            return self._again(map_leaves(_on_host, self._make(chosen)), count)
        return self._with_order([chosen[i] for i in _mixed_up(count)])

    def backwards(self, count: int) -> Ordered:
        """The first `count` samples in the opposite order."""
        return self._with_order(self._order[:count][::-1])

    @property
    def is_whole(self) -> bool:
        """Whether it is an ordinary batch, of which all samples together are a view."""
        return self._views is not None

    @property
    def largest(self) -> int:
        """Elements of the largest sample, as large in each tensor as any."""
        return max(self.sizes, default=0)

    @property
    def available(self) -> int | None:
        """How many samples `copies` can make; None: any number."""
        return self.samples if self.in_order else None

    def load(self, pieces: Sequence[int]) -> tuple[Shapes | None, int]:
        """(the shapes that samples share, the most that a micro-batch of these sizes holds: elements, or samples)."""
        return self.shapes, max((n * max(1, self.sizes[start]) for n, (start, _) in zip(pieces, bounds(pieces))), default=0)

    def cut_at(self, pieces: Sequence[int]) -> None:
        """Make all pieces of these sizes now where they are views: one after the other that takes a fraction of the time."""
        self._ready = {} if self._views is None else dict(zip(bounds(pieces), self._views(pieces)))

    def piece(self, start: int, stop: int) -> Any:
        """The samples `start:stop` in this order, collated or cut."""
        ready = self._ready.pop((start, stop), None)
        return self._make(self._order[start:stop]) if ready is None else ready

    def copies(self, index: int, count: int) -> Any:
        """`count` samples like the `index`-th: that one again and again where samples are collated, with those after it that
        are larger in some tensor, else the first ones."""
        if self.ragged:
            chosen = self._largest_from(index)
            return self._make([self._order[chosen[i % len(chosen)]] for i in range(count)])
        return self._make([self._order[i % self.samples] for i in range(count)])

    def _largest_from(self, index: int) -> list[int]:
        """The `index`-th sample, and one after it for each tensor in which another is larger."""
        missing = [k for k, (own, most) in enumerate(zip(self._own[index], self.extents[index])) if own < most]
        after = range(index, self.samples)
        return list(dict.fromkeys((index, *(max(after, key=lambda i: self._own[i][k]) for k in missing))))

    def around(self, index: int) -> Callable[[int, int], Any]:
        """Pieces of samples of about the size of the `index`-th, in turns, for timing."""
        span = max(1, self.samples // 4) if self.ragged else self.samples
        start = max(0, min(index - span // 2, self.samples - span))
        return lambda low, high: self._make([self._order[start + i % span] for i in range(low, high)])

    def twins(self, index: int, count: int, twin: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """`copies`, with fake tensors for real ones."""
        return twins_of(self.copies(index, count), twin)

    def alike(self, count: int) -> Any:
        """The largest sample as often as that."""
        return self._make([self._order[0]] * count)

    def spread(
        self, parts: Sequence[int], rivals: Sequence[Callable[[Any], Any]] = (), own: Callable[[Any], Any] | None = None
    ) -> Callable[[int, int], Any]:
        """Samples for proofs, in two parts of these sizes: as different as there are, in what a loss may count or, with
        `rivals`, in these counts relative to `own`."""
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
            there = [self._order[i] for i in spaced(self.samples)]
            marks = [marks_of(self._make([i])) for i in there]
            if self.ragged:
                marks = [{**mark, "size": float(sum(self._own[i]))} for mark, i in zip(marks, spaced(self.samples))]
            chosen = [there[i] for i in most_telling(marks, parts)]
        return lambda low, high: self._make(chosen[low:high])

    def twice(self, count: int) -> Callable[[int, int], Any]:
        """The first `count` samples, and the same once more."""
        chosen = [self._order[i % self.samples] for i in range(count)] * 2
        return lambda low, high: self._make(chosen[low:high])

    def _with_order(self, order: Sequence[int]) -> Ordered:
        """The batch's samples in this order."""
        view = Ordered(0, [], self._make, shapes=self.shapes, in_order=self.in_order, again=self._again)
        view.samples, view._order, view.ragged = len(order), order, self.ragged
        view.sizes, view._own = [0] * len(order), [()] * len(order)
        view.extents = view._own
        return view


def _counted(count: Callable[[Any], Any], sample: Any) -> float:
    """What is counted in one sample; less than anything where it holds what cannot be counted any more."""
    try:
        return float(count(sample))
    except WeightsChanged:
        return -1.0


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _mixed_up(count: int) -> list[int]:
    """0..count-1 with neighbours far apart, so that parts of it are alike."""
    return [i for start in range(4) for i in range(start, count, 4)]
