"""Holds one effective batch as samples that are not collated yet.

Step mode cuts between samples, so that each micro-batch is collated separately and padded only to its own longest sample.
Not covered: samples that share state, and collate functions that write into a sample's *tensors*, which see their own writes
when the sample is collated again. Keys they pop and items they append are undone, because containers are copied.
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
"""Maximum length of a tuple of parts. A longer tuple is one part, a tuple of numbers."""
Collate = Callable[[list[Any]], Any]
Drawing = Callable[[int], AbstractContextManager[Any]]


def _as_it_comes(first: int) -> AbstractContextManager[Any]:
    return nullcontext()


class SampleBatch(Sequence[Any]):
    """One effective batch: `batch[i]` is a sample, `batch.collate()` applies the script's collate function.

    `samples` may unpack lazily: only requested samples are read, one at a time. `drawing` is a context entered around each
    collation, with the index of its first sample. The loader's context fixes the random draws of the collation, so that
    collating an effective batch again gives the same result.
    """

    def __init__(self, samples: Sequence[Any], collate_fn: Collate, *, drawing: Drawing = _as_it_comes) -> None:
        self._samples = samples
        self._collate_fn = collate_fn
        self._drawing = drawing
        self._extents: list[Extent] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Any]:
        # Sequence's own __iter__ takes an IndexError raised inside a sample for the end.
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
        """Apply the script's collate function to the samples at `indices`, in that order (None: all samples).

        Errors of the collate function propagate.
        """
        chosen = range(len(self)) if indices is None else indices
        with self._drawing(chosen[0] if len(chosen) else 0):
            return self._collate_fn([_with_own_containers(self._samples[i]) for i in chosen])

    def without_gaps(self) -> SampleBatch:
        """Return the batch without samples that are None if the collate function drops them, else the batch itself."""
        sizes = self.sizes()
        present = [i for i, size in enumerate(sizes) if size or self._samples[i] is not None]
        if not present or len(present) == len(self) or not self._leaves_out(present[0]):
            return self
        found = SampleBatch([self._samples[i] for i in present], self._collate_fn, drawing=self._drawing)
        extents = self.extents()
        found._extents = [extents[i] for i in present]
        return found

    def _leaves_out(self, index: int) -> bool:
        """Whether a sample collates to the same shapes next to None as alone."""
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
        """Return, per sample, the elements in each of its tensors, or their total if samples differ in structure. The result
        is cached."""
        if self._extents is None:
            found = [() if sample is None else extent_of(tuple(sample) if type(sample) is list else sample) for sample in self]
            alike = len({len(extent) for extent in found if extent}) == 1 and all(found)
            self._extents = found if alike else [(sum(extent),) for extent in found]
        return list(self._extents)

    def sizes(self) -> list[int]:
        """Return the number of elements per sample (`count_elements`). Samples are ordered by it."""
        return [sum(extent) for extent in self.extents()]

    def nbytes(self) -> int:
        """Estimate the bytes of tensors and arrays in all samples, from the first sample and the sizes."""
        sizes = self.sizes()
        return count_bytes(self._samples[0]) * sum(sizes) // max(1, sizes[0]) if sizes else 0


def extent_of(sample: Any) -> Extent:
    """Return `count_elements` of each part of a sample: the entries of tuples, mappings and dataclasses, in any nesting."""
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
    """Count the elements of tensors, arrays and images, the characters of texts, and one per number, in any nesting."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, (str, bytes, bytearray)):
        return len(sample)
    if isinstance(sample, (list, tuple, Set)):
        # Token lists are long, so this avoids a call per number.
        return sum(1 if type(item) in (int, float, bool) else count_elements(item) for item in sample)
    if isinstance(sample, Mapping):
        return sum(count_elements(value) for value in sample.values())
    if is_dataclass(sample) and not isinstance(sample, type):
        return sum(count_elements(getattr(sample, field.name, None)) for field in fields(sample))
    return _count_opaque(sample)


def count_bytes(sample: Any) -> int:
    """Count the bytes of dense tensors and arrays in a sample, in any nesting. Views of larger memory do not count (a row of a
    data set exists anyway). Texts and numbers are neglected."""
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
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):  # PIL images: width and height
        return math.prod(size)
    return 1


def _with_own_containers(sample: Any) -> Any:
    # Many collate functions pop labels off their samples, and a sample may be collated more than once.
    if type(sample) is dict:
        return {key: _with_own_containers(value) for key, value in sample.items()}
    if type(sample) is tuple:
        return tuple(_with_own_containers(item) for item in sample)
    if type(sample) is list or isinstance(sample, MutableMapping):
        return copy.copy(sample)
    return sample
