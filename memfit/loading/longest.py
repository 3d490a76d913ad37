"""Finds the longest samples of a dataset before training: the batch that needs the most memory is made of them.

Not covered: datasets without indices (`IterableDataset`) and datasets that cannot be copied, which are not read; what a
collate function makes of the samples; files that anything inside the dataset, except other datasets, opens lazily.
"""

from __future__ import annotations

import copy
import heapq
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from memfit.batches.samples import extent_of
from memfit.loading.draws import preserved


@dataclass(frozen=True)
class Scan:
    """Holds what a scan of a dataset found."""

    samples: list[Any]
    """The longest samples seen, longest first, then samples with a longer tensor than any of these."""
    sizes: tuple[int, ...]
    """Elements of every sample seen, in the order they were seen."""
    complete: bool
    """Whether every sample of the dataset was seen."""
    seen: int
    """Number of samples seen."""


def longest_samples(dataset: Any, count: int, seconds: float = 0.5) -> Scan:
    """Find the `count` samples with the most elements, among those that can be read within `seconds`.

    Samples are read in a fixed random order, with all random generators preserved, from a shallow copy of the dataset:
    the copy opens lazily opened files, so that workers forked later do not inherit them. Exceptions from the
    dataset pass through.
    """
    length = _length(dataset)
    try:
        own = own_copy(dataset, {}) if length else None
    except (TypeError, copy.Error):
        own = None
    if own is None:
        return Scan([], (), complete=False, seen=0)
    sizes: list[int] = []
    longest: list[tuple[int, int, Any]] = []  # a heap; the second number decides ties, so samples are never compared
    by_tensor: dict[tuple[int, int], tuple[int, Any]] = {}  # by (number of tensors, position)
    with preserved():
        stop = time.perf_counter() + seconds
        for i in _shuffled(length):
            sample = own[i]
            extent = extent_of(sample)
            sizes.append(sum(extent))
            for key, elements in (((len(extent), k), elements) for k, elements in enumerate(extent)):
                if elements > by_tensor.get(key, (0, None))[0]:
                    by_tensor[key] = elements, sample
            heapq.heappush(longest, (sizes[-1], -len(sizes), sample))
            if len(longest) > count:
                heapq.heappop(longest)
            if time.perf_counter() >= stop:
                break
    ordered = [sample for _, _, sample in sorted(longest, key=lambda entry: entry[:2], reverse=True)]
    there = [extent_of(sample) for sample in ordered]
    for (tensors, k), (elements, sample) in by_tensor.items():
        if elements > max((extent[k] for extent in there if len(extent) == tensors), default=0):
            ordered.append(sample)
            there.append(extent_of(sample))
    return Scan(ordered, tuple(sizes), complete=len(sizes) == length, seen=len(sizes))


def _length(dataset: Any) -> int:
    """How many indices the dataset has; 0 if it has none or does not say."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return 0
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


def own_copy(dataset: Any, known: dict[int, Any]) -> Any:
    """Return a shallow copy, also of the datasets inside it (subsets, concatenations): they open the files."""
    if id(dataset) in known:
        return known[id(dataset)]
    own = known[id(dataset)] = copy.copy(dataset)
    for name, value in list(getattr(own, "__dict__", {}).items()):
        if isinstance(value, Dataset):
            vars(own)[name] = own_copy(value, known)
        elif type(value) in (list, tuple) and any(isinstance(item, Dataset) for item in value):
            vars(own)[name] = type(value)(
                own_copy(item, known) if isinstance(item, Dataset) else item for item in value
            )
    return own


def _shuffled(length: int) -> Iterator[int]:
    """All indices in a random order, drawn as needed: a permutation of a large dataset would take memory."""
    draw = random.Random(0)
    moved: dict[int, int] = {}
    for i in range(length):
        j = draw.randrange(i, length)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)
