"""One effective batch as samples that are not collated yet.

Step mode cuts between samples, so that each micro-batch is collated by itself and padded only to its own longest. Not
covered: a batch whose samples share state. A collate function that writes into a sample's *tensors* meets its own
writes when the sample is collated again; keys it pops and items it appends are undone, because containers are copied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, overload

import torch

from memfit.batches.extents import Extent
from memfit.batches.tree import flat, tensors

MOST_PARTS = 32
"""A longer tuple is one of numbers."""
Collate = Callable[[list[Any]], Any]
Drawing = Callable[[int], AbstractContextManager[Any]]


def _as_it_comes(first: int) -> AbstractContextManager[Any]:
    return nullcontext()


class SampleBatch(Sequence[Any]):
    """One effective batch: `batch[i]` is a sample, `batch.collate()` what the script's collate function makes of them.

    `samples` may unpack lazily: only what is asked for is read, one sample at a time. `drawing` is entered around each
    collation with the index of its first sample; a loader gives one that fixes the random draws of that collation, so
    that an effective batch that is tried again is collated the same way.
    """

    def __init__(self, samples: Sequence[Any], collate_fn: Collate, *, drawing: Drawing = _as_it_comes) -> None:
        self._samples = samples
        self._collate_fn = collate_fn
        self._drawing = drawing
        self._extents: list[Extent] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Any]:
        # Not Sequence's own: that one takes an IndexError raised inside a sample for the end.
        return map(self._samples.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._samples[i] for i in range(*index.indices(len(self)))]
        return self._samples[index]

    def collate(self, indices: Sequence[int] | None = None) -> Any:
        """What the script's collate function makes of the samples at `indices`, in that order (None: all of them).

        Raises whatever the collate function raises, as itself.
        """
        chosen = range(len(self)) if indices is None else indices
        with self._drawing(chosen[0] if len(chosen) else 0):
            return self._collate_fn([_with_own_containers(self._samples[i]) for i in chosen])

    def without_gaps(self) -> SampleBatch:
        """The batch without samples that are None, where the collate function leaves these out; else the batch as it is."""
        sizes = self.sizes()
        present = [i for i, size in enumerate(sizes) if size or self._samples[i] is not None]
        if not present or len(present) == len(self) or not self._leaves_out(present[0]):
            return self
        found = SampleBatch([self._samples[i] for i in present], self._collate_fn, drawing=self._drawing)
        extents = self.extents()
        found._extents = [extents[i] for i in present]
        return found

    def _leaves_out(self, index: int) -> bool:
        """Whether a sample collated beside None gives what it gives by itself, as far as shapes tell."""
        sample = _with_own_containers
        with self._drawing(index):
            try:
                beside = self._collate_fn([sample(self._samples[index]), None])
            except Exception:
                return False
            alone = self._collate_fn([sample(self._samples[index])])
        shapes = [tuple(tensor.shape) for tensor in tensors(alone)]
        return bool(shapes) and shapes == [tuple(tensor.shape) for tensor in tensors(beside)]

    def extents(self) -> list[Extent]:
        """Per sample the elements in each of its tensors (in all together, where samples differ in what they hold). Looked at
        once, then kept."""
        if self._extents is None:
            found = [() if sample is None else extent_of(tuple(sample) if type(sample) is list else sample) for sample in self]
            alike = len({len(extent) for extent in found if extent}) == 1 and all(found)
            self._extents = found if alike else [(sum(extent),) for extent in found]
        return list(self._extents)

    def sizes(self) -> list[int]:
        """Per sample the elements in it (`count_elements`): what samples are ordered by."""
        return [sum(extent) for extent in self.extents()]

    def nbytes(self) -> int:
        """Bytes of tensors and arrays in the samples, told from the first one by their sizes."""
        sizes = self.sizes()
        return count_bytes(self._samples[0]) * sum(sizes) // max(1, sizes[0]) if sizes else 0


def extent_of(sample: Any) -> Extent:
    """`count_elements` of each part of a sample that is a tuple, a mapping or a dataclass, in any nesting."""
    if isinstance(sample, Mapping):
        parts: Iterable[Any] = sample.values()
    elif isinstance(sample, tuple) and len(sample) <= MOST_PARTS:
        parts = sample
    elif is_dataclass(sample) and not isinstance(sample, type):
        parts = [getattr(sample, field.name, None) for field in fields(sample)]
    else:
        return (count_elements(sample),)
    return tuple(n for part in parts for n in extent_of(part))


def count_elements(sample: Any) -> int:
    """Elements of tensors, arrays and images, characters of texts, and one for each number, in any nesting."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, (str, bytes, bytearray)):
        return len(sample)
    if isinstance(sample, (list, tuple, Set)):
        # Token lists are long: numbers are counted without a call each.
        return sum(1 if type(item) in (int, float, bool) else count_elements(item) for item in sample)
    if isinstance(sample, Mapping):
        return sum(count_elements(value) for value in sample.values())
    if is_dataclass(sample) and not isinstance(sample, type):
        return sum(count_elements(getattr(sample, field.name, None)) for field in fields(sample))
    return _count_opaque(sample)


def count_bytes(sample: Any) -> int:
    """Bytes of the dense tensors and the arrays in a sample, in any nesting, that are no part of something larger (a row of a
    data set is there anyway); texts and numbers take few."""
    return sum(leaf.nbytes for leaf in flat(sample) if _stands_alone(leaf))


def _stands_alone(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        dense = leaf.layout is torch.strided and not leaf.is_nested
        return dense and leaf.untyped_storage().nbytes() <= leaf.nbytes
    is_array = type(leaf).__module__ == "numpy" and isinstance(getattr(leaf, "nbytes", None), int)
    return is_array and leaf.base is None


def _count_opaque(sample: Any) -> int:
    size = getattr(sample, "size", None)
    if isinstance(size, int):  # NumPy
        return size
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):  # images: width and height
        return math.prod(size)
    return 1


def _with_own_containers(sample: Any) -> Any:
    # Many collate functions pop labels off their samples; a sample may be collated more than once.
    if type(sample) is dict:
        return {key: _with_own_containers(value) for key, value in sample.items()}
    if type(sample) is tuple:
        return tuple(_with_own_containers(item) for item in sample)
    if type(sample) is list or isinstance(sample, MutableMapping):
        return copy.copy(sample)
    return sample
