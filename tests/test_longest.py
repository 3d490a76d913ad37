"""The longest samples: found within the time given, and without a trace."""

import random
from itertools import count

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from memfit.loading import longest
from memfit.loading.longest import longest_samples


class Texts(Dataset):
    """Samples of given lengths, read from a file that is opened at the first access."""

    def __init__(self, lengths, read=lambda: None):
        self.lengths, self.read, self.file = lengths, read, None

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        self.file = self.file or object()
        self.read()
        return torch.rand(self.lengths[i]), float(np.random.rand()), random.random()


class Stream(IterableDataset):
    """A dataset without indices, but with a length."""

    def __len__(self):
        return 3

    def __iter__(self):
        raise AssertionError("nobody is to read this")


LENGTHS = [(7 * i) % 101 for i in range(101)]


def states():
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


def test_finds_the_longest_and_all_sizes():
    scan = longest_samples(Texts(LENGTHS), 3, seconds=30)
    assert [len(sample[0]) for sample in scan.samples] == [100, 99, 98]
    assert scan.complete and scan.seen == 101
    assert sorted(scan.sizes) == sorted(n + 2 for n in LENGTHS)


def test_goes_through_the_dataset_in_a_random_order():
    sizes = longest_samples(Texts(range(50)), 1, seconds=30).sizes
    assert sorted(sizes) == list(range(2, 52)) and list(sizes) != sorted(sizes)
    assert len(set(sizes[:10]) & set(range(2, 12))) < 8


def test_fewer_samples_than_asked_for():
    assert len(longest_samples(Texts([1, 2]), 5, seconds=30).samples) == 2


def test_samples_that_cannot_be_compared_may_be_equally_long():
    assert len(longest_samples(TensorDataset(torch.zeros(5, 3)), 2, seconds=30).samples) == 2


def test_stops_when_the_time_is_up_but_not_before_one_sample(monkeypatch):
    passed = count()
    now = [next(passed)]
    monkeypatch.setattr(longest.time, "perf_counter", lambda: now[0])
    scan = longest_samples(Texts(LENGTHS, read=lambda: now.__setitem__(0, next(passed))), 2, seconds=5)
    assert scan.seen == 5 and not scan.complete and len(scan.sizes) == scan.seen
    assert longest_samples(Texts(LENGTHS), 2, seconds=0).seen == 1


@pytest.mark.parametrize("fails", [False, True], ids=["", "failing"])
def test_leaves_no_trace(fails):
    before = states()
    dataset = Texts([3, "not a length"] if fails else LENGTHS)
    try:
        longest_samples(dataset, 2, seconds=30)
        assert not fails
    except TypeError:
        assert fails
    assert states() == before
    assert dataset.file is None


def test_files_are_opened_by_a_copy_also_in_datasets_inside_datasets():
    inner = Texts(LENGTHS)
    together = Subset(ConcatDataset([inner, inner]), range(150))
    assert longest_samples(together, 1, seconds=30).complete
    assert inner.file is None


def test_errors_of_the_dataset_surface_as_themselves():
    class Broken(Texts):
        def __getitem__(self, i):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        longest_samples(Broken(LENGTHS), 1)


class Endless(Dataset):
    """Has indices but no length."""

    def __getitem__(self, i):
        raise AssertionError("nobody is to read this")


class Fixed(Texts):
    """Cannot be copied."""

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle")


@pytest.mark.parametrize("dataset", [Stream(), Endless(), Texts([]), Fixed(LENGTHS)])
def test_nothing_is_seen_of_datasets_that_cannot_be_looked_through(dataset):
    scan = longest_samples(dataset, 3)
    assert (scan.samples, scan.sizes, scan.complete, scan.seen) == ([], (), False, 0)


def test_the_longest_in_each_tensor_is_among_them():
    pairs = [(torch.zeros(200 - 2 * i), torch.zeros(i)) for i in range(40)]
    found = longest_samples(pairs, 3, seconds=30).samples
    assert [len(audio) for audio, _ in found] == [200, 198, 196, 122]
