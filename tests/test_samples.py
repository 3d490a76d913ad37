"""SampleBatch: samples that are collated on demand, in any choice and order, as often as needed."""

from collections import UserDict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from memfit.batches.samples import SampleBatch, count_elements
from memfit.loading.packing import pack


@dataclass
class Record:
    """A sample of a type of the user's own."""

    tokens: torch.Tensor
    text: str


class Image:
    """Has a size as PIL's images have."""

    size = (4, 3)


class Reading(Sequence):
    """Notes which samples are read."""

    def __init__(self, samples):
        self.samples, self.read = samples, []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read.append(index)
        return self.samples[index]


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


LENGTHS = [3, 7, 1, 5]


@pytest.fixture(params=[list, pack], ids=["kept", "packed"])
def batch(request):
    return SampleBatch(request.param([torch.arange(n) for n in LENGTHS]), padded)


def test_is_a_sequence_of_the_samples(batch):
    assert isinstance(batch, Sequence) and len(batch) == 4
    assert [len(sample) for sample in batch] == LENGTHS
    assert [len(sample) for sample in batch[1:3]] == [7, 1] and len(batch[-1]) == 5


def test_collates_the_whole_or_a_choice_in_its_order(batch):
    assert torch.equal(batch.collate(), padded([torch.arange(n) for n in LENGTHS]))
    assert torch.equal(batch.collate([3, 0]), padded([torch.arange(5), torch.arange(3)]))
    assert batch.collate([2]).shape == (1, 1)


def test_sizes_are_those_of_the_samples(batch):
    assert batch.sizes() == LENGTHS


def test_sizes_are_looked_at_once():
    samples = Reading([torch.arange(2), torch.arange(3)])
    batch = SampleBatch(samples, padded)
    batch.sizes().clear()
    assert batch.sizes() == [2, 3] and samples.read == [0, 1]


def test_only_the_chosen_samples_are_read():
    samples = Reading([torch.arange(2) for _ in range(10)])
    SampleBatch(samples, padded).collate([4, 7])
    assert samples.read == [4, 7]


@pytest.mark.parametrize(
    ("sample", "elements"),
    [
        (torch.zeros(2, 3), 6),
        (np.zeros((2, 3)), 6),
        (np.float32(1), 1),
        ("four", 4),
        (b"four", 4),
        ([1, 2, 3], 3),
        ([[1, 2], [3.0, True]], 4),
        ((torch.zeros(5), 3), 6),
        ({"input_ids": [1] * 9, "labels": torch.zeros(2)}, 11),
        (UserDict(a="abc", b=(np.zeros(2),)), 5),
        (Record(torch.zeros(5), "ab"), 7),
        (Image(), 12),
        (None, 1),
        (torch.eye(3).to_sparse(), 9),
    ],
)
def test_elements_are_counted_in_any_nesting(sample, elements):
    assert count_elements(sample) == elements


@pytest.mark.parametrize("wrap", [dict, UserDict, lambda sample: (sample, 1)], ids=["dict", "UserDict", "in a tuple"])
@pytest.mark.parametrize("arrive", [list, pack], ids=["kept", "packed"])
def test_collating_again_is_the_same_for_collates_that_pop(wrap, arrive):
    def popping(samples):
        samples = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
        labels = [sample.pop("label") for sample in samples]
        return default_collate([dict(sample) for sample in samples]), labels

    samples = [{"x": torch.tensor(i), "label": i} for i in range(3)]
    batch = SampleBatch(arrive([wrap(sample) for sample in samples]), popping)
    first, again = batch.collate(), batch.collate()
    assert first[1] == again[1] == [0, 1, 2] and torch.equal(first[0]["x"], again[0]["x"])


def test_errors_of_the_collate_function_surface_as_themselves():
    with pytest.raises(ZeroDivisionError):
        SampleBatch([1], lambda samples: 1 / 0).collate()


def test_drawing_is_entered_with_the_first_of_the_samples():
    entered = []

    @contextmanager
    def drawing(first):
        entered.append(first)
        yield
        entered.append("left")

    batch = SampleBatch([1, 2, 3], lambda samples: entered.append(samples), drawing=drawing)
    batch.collate([2, 1])
    batch.collate()
    assert entered == [2, [3, 2], "left", 0, [1, 2, 3], "left"]


class NoBytes:
    @property
    def nbytes(self) -> int:
        raise ValueError("not known before it is read")


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        ({"image": torch.zeros(3, 4), "label": 5, "text": "some"}, 48),
        ((np.zeros(4), [torch.zeros(2, dtype=torch.int64)]), 48),
        (torch.eye(3).to_sparse(), 0),
        (torch.zeros(8, 3)[2], 0),  # a row of a data set that is there anyway
        (np.zeros((8, 3))[2], 0),
        (NoBytes(), 0),
        (None, 0),
    ],
)
def test_bytes_of_samples_are_those_of_tensors_and_arrays(sample: Any, size: int) -> None:
    assert SampleBatch([sample] * 3, list).nbytes() == 3 * size


def test_bytes_of_samples_are_told_by_their_sizes() -> None:
    assert SampleBatch([torch.zeros(n) for n in (2, 4, 6)], list).nbytes() == 4 * (2 + 4 + 6)
    assert SampleBatch([], list).nbytes() == 0
