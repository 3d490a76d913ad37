"""EffectiveLoader: the script's loader, regrouped; same samples, same order, same draws, no more shared memory."""

import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import memfit
from memfit._errors import UsageError
from memfit.batches.samples import SampleBatch
from memfit.loading.inner import leftover
from memfit.loading.loader import BatchInfo, EffectiveLoader

# Python 3.12 warns about forking beside torch's threads; a plain DataLoader forks the same way.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Noisy(Dataset):
    """Samples with an augmentation of every random generator; sample i says that it is i."""

    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return torch.tensor(i), torch.rand(2), np.random.rand(2), random.random()


class Counting(IterableDataset):
    """A stream of `length` numbers; workers take turns, in shares of different size."""

    def __init__(self, length, says=False):
        self.length = length
        if says:
            self.__class__ = CountingWithLength

    def __iter__(self):
        worker = get_worker_info()
        numbers = range(self.length)
        if worker is not None:
            third = self.length // 3
            numbers = numbers[:third] if worker.id == 0 else numbers[third:]
        return (torch.tensor(i) for i in numbers)


class CountingWithLength(Counting):
    """The same, with a length."""

    def __len__(self):
        return self.length


class Ragged:
    """A batch sampler with batches of 3, 1, 4, 1, 5, 9 samples."""

    sizes = (3, 1, 4, 1, 5, 9)

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self):
        return len(self.sizes)


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return torch.tensor(i)


def numbers(length, **options):
    return DataLoader(Numbers(length), **options)


def effective(source, share, collated=True, **options):
    return EffectiveLoader(source, share=share, collated=collated, **options)


def read(loader):
    return [batch.tolist() for batch in loader]


def flat(lists):
    return [item for items in lists for item in items]


def rest(iterator):
    """Reads on to the end, past errors: workers of an epoch left at an error die slowly (of a plain loader as well)."""
    while True:
        try:
            next(iterator)
        except ZeroDivisionError:
            continue
        except StopIteration:
            return


def joined(batches):
    """The batches' columns, each as one tensor."""
    return [torch.cat(column) for column in zip(*batches)]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# What is yielded


@WORKERS
@pytest.mark.parametrize("share", [1, 3, 4, 10, 23, 50])
def test_effective_batches_have_the_share(workers, share):
    loader = effective(numbers(23, batch_size=4, num_workers=workers), share)
    expected = [list(range(23))[i : i + share] for i in range(0, 23, share)]
    assert read(loader) == expected
    assert len(loader) == len(expected) and loader.batch_size == share


@WORKERS
def test_drop_last_drops_an_incomplete_effective_batch_and_no_script_batch(workers):
    # The script's own loader would drop samples 20 to 22, which complete the second effective batch here.
    loader = effective(numbers(23, batch_size=4, drop_last=True, num_workers=workers), 11)
    assert read(loader) == [list(range(11)), list(range(11, 22))]
    assert len(loader) == 2 and loader.drop_last
    assert read(loader) == [list(range(11)), list(range(11, 22))]


@WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("collated", [False, True])
def test_without_a_share_the_scripts_batches_are_the_effective_ones(workers, drop_last, collated):
    source = numbers(10, batch_size=4, drop_last=drop_last, num_workers=workers)
    infos = []
    loader = effective(source, None, collated, on_batch=infos.append)
    batches = [batch if collated else batch.uncollated.collate() for batch in loader]
    assert equal(batches, list(source))
    assert len(loader) == len(source) == len(batches) and loader.batch_size == 4
    assert [info.samples for info in infos] == [len(batch) for batch in batches]


@WORKERS
def test_without_a_share_workers_collate_as_before(workers):
    loader = effective(DataLoader(Numbers(4), batch_size=2, num_workers=workers, collate_fn=where), None)
    assert list(loader) == ([(0, 2), (1, 2)] if workers else [(None, 2)] * 2)


def where(samples):
    worker = get_worker_info()
    return worker and worker.id, len(samples)


@WORKERS
def test_sample_batches_are_lazy_samples_of_the_share(workers):
    loader = effective(DataLoader(Noisy(), batch_size=4, num_workers=workers), 10, collated=False)
    batches = list(loader)
    assert all(isinstance(batch.uncollated, SampleBatch) for batch in batches)
    assert [len(batch.uncollated) for batch in batches] == [10, 10, 3] and len(loader) == 3
    assert [int(sample[0]) for batch in batches for sample in batch.uncollated] == list(range(23))
    assert batches[1].uncollated.collate([3, 1])[0].tolist() == [13, 11]


@WORKERS
@pytest.mark.parametrize(
    ("share", "sizes"), [(None, [3, 1, 4, 1, 5, 9]), (4, [4, 4, 6, 9]), (5, [8, 6, 9]), (100, [23])]
)
def test_batches_of_a_batch_sampler_stay_whole(workers, share, sizes):
    source = DataLoader(Numbers(23), batch_sampler=Ragged(), num_workers=workers)
    loader = effective(source, share, collated=False)
    assert [len(batch) for batch in loader] == sizes
    assert loader.batch_sampler is source.batch_sampler and loader.batch_size is None


def test_the_length_with_a_batch_sampler():
    class Even(BatchSampler):
        """A batch sampler of the script's."""

    source = DataLoader(Numbers(23), batch_sampler=Even(SequentialSampler(range(23)), 4, False))
    for share in (1, 4, 5, 9, 100):
        loader = effective(source, share)
        assert len(loader) == len(list(loader))
    ragged = effective(DataLoader(Numbers(23), batch_sampler=Ragged()), 8)  # an estimate: 23 samples in 6 batches
    assert len(ragged) == 2 and len(effective(ragged, None)) == 6


@pytest.mark.parametrize("drop_last", [False, True])
def test_torchs_own_batch_sampler_is_split_also_when_passed_by_hand(drop_last):
    source = DataLoader(Numbers(10), batch_sampler=BatchSampler(range(10), 4, drop_last))
    loader = effective(source, 3)
    assert [len(batch) for batch in loader] == [3, 3, 3] + [1] * (not drop_last)
    assert len(loader) == 3 + (not drop_last)


@WORKERS
@pytest.mark.parametrize("share", [None, 3])
@pytest.mark.parametrize("collated", [False, True])
def test_whole_batches_of_the_dataset_pass_through(workers, share, collated):
    infos = []
    source = DataLoader(TensorDataset(torch.arange(8.0).view(4, 2)), batch_size=None, num_workers=workers)
    loader = effective(source, share, collated, on_batch=infos.append)
    assert equal([row for (row,) in loader], [row for (row,) in source])
    assert len(loader) == 4 and loader.batch_size is None
    assert [info.samples for info in infos] == [None] * 4


@WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
def test_iterable_datasets_with_uneven_workers(workers, drop_last):
    loader = effective(DataLoader(Counting(20), batch_size=4, num_workers=workers, drop_last=drop_last), 6)
    for _ in range(2):
        batches = read(loader)
        assert [len(batch) for batch in batches] == [6, 6, 6] + [2] * (not drop_last)
        seen = flat(batches)
        assert len(set(seen)) == len(seen) and (drop_last or sorted(seen) == list(range(20)))
    with pytest.raises(TypeError):
        len(loader)


def test_iterable_datasets_with_a_length():
    for options, length in (({}, 4), ({"drop_last": True}, 3)):
        loader = effective(DataLoader(Counting(20, says=True), batch_size=4, **options), 6)
        assert len(loader) == length == len(list(loader))
    assert len(effective(DataLoader(Counting(20, says=True), batch_size=8), None)) == 3


def test_pieces_in_any_order_of_the_workers():
    if not hasattr(numbers(1), "in_order"):
        pytest.skip("this torch has no in_order")
    loader = effective(numbers(23, batch_size=4, num_workers=2, in_order=False), 10)
    batches = read(loader)
    assert [len(batch) for batch in batches] == [10, 10, 3] and sorted(flat(batches)) == list(range(23))
    assert loader.in_order is False


# What it is


def test_it_is_a_data_loader_with_the_scripts_attributes():
    source = DataLoader(
        Numbers(),
        batch_size=2,
        sampler=SequentialSampler(range(10)),
        num_workers=1,
        collate_fn=where,
        timeout=30,
        worker_init_fn=random.seed,
        multiprocessing_context="fork",
        generator=torch.Generator(),
        prefetch_factor=3,
        persistent_workers=True,
        pin_memory=True,
    )
    loader = effective(source, 6)
    assert isinstance(loader, DataLoader) and loader.source is source
    for name in set(vars(source)) - {"_iterator", "batch_size"}:
        assert getattr(loader, name) is getattr(source, name)
    assert loader.multiprocessing_context is source.multiprocessing_context
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_size = 3
    assert source.batch_size == 2 and source.collate_fn is where and source.batch_sampler.batch_size == 2


def test_members_of_a_subclass_are_found():
    class Own(DataLoader):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.note = "mine"

        def shape(self):
            return len(self.dataset)

    loader = effective(Own(Numbers(), batch_size=2), 4)
    assert loader.note == "mine" and loader.shape() == 10
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        getattr(loader, "nothing_of_the_sort")  # noqa: B009
    assert [len(batch) for batch in pickle.loads(pickle.dumps(effective(numbers(10, batch_size=2), 4)))] == [4, 4, 2]


def test_a_subclass_that_changes_its_batches_is_refused_or_passed_on():
    class Doubling(DataLoader):
        def __iter__(self):
            return (batch * 2 for batch in super().__iter__())

    infos = []
    assert read(effective(Doubling(Numbers(4), batch_size=2), None, on_batch=infos.append)) == [[0, 2], [4, 6]]
    assert infos[0].samples is None
    with pytest.raises(UsageError, match="its own __iter__ yields list objects"):
        next(iter(effective(Doubling(Numbers(4), batch_size=2), 4)))


def test_wrapping_again_starts_from_the_scripts_loader():
    loader = effective(effective(numbers(10, batch_size=4, drop_last=True), 6), 5, collated=False)
    assert [len(batch) for batch in loader] == [5, 5] and type(loader.source) is DataLoader


@pytest.mark.parametrize("share", [0, -3])
def test_a_share_below_one_is_refused(share):
    with pytest.raises(UsageError, match="at least one sample"):
        effective(numbers(3), share)


def test_set_epoch_reaches_the_scripts_sampler():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1, shuffle=True)
    loader = effective(DataLoader(Numbers(20), sampler=sampler, batch_size=3), 5)
    orders = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        orders.append(read(loader))
        assert flat(orders[-1]) == list(sampler)
    assert orders[0] == orders[2] != orders[1]


def test_a_sampler_that_is_told_the_epoch_draws_as_it_likes():
    class Told:
        """A sampler that knows the epoch, and draws from the global generator all the same."""

        def set_epoch(self, epoch):
            raise AssertionError("nobody but the script is to call this")

        def __iter__(self):
            return iter(torch.randperm(20).tolist())

        def __len__(self):
            return 20

    def orders(wrap):
        seed_everything()
        loader = wrap(DataLoader(Numbers(20), sampler=Told(), batch_size=5, generator=torch.Generator()))
        return [flat(read(loader)) for _ in range(3)]

    assert orders(lambda loader: effective(loader, 10)) == orders(lambda loader: loader)


def test_workers_of_the_scripts_own_iteration_are_not_taken_over():
    source = numbers(10, batch_size=2, num_workers=1, persistent_workers=True)
    theirs = iter(source)
    assert next(theirs).tolist() == [0, 1]
    assert read(effective(source, 6)) == [list(range(6)), list(range(6, 10))]
    assert next(theirs).tolist() == [2, 3]


# Draws and epochs


SAMPLERS = {
    "shuffled": lambda data: {"shuffle": True},
    "weighted": lambda data: {"sampler": WeightedRandomSampler(torch.ones(len(data)), 17)},
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(0, 23, 2))},
    "with replacement": lambda data: {"sampler": RandomSampler(data, replacement=True)},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 4, False)},
}


def shuffled(workers=0, kind="shuffled", data=None, **options):
    data = data or Noisy()
    order = SAMPLERS[kind](data) if kind in SAMPLERS else {}
    size = {} if "batch_sampler" in order else {"batch_size": 4}
    return DataLoader(data, **order, **size, num_workers=workers, **options)


def seed_everything(seed=0):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def states():
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@WORKERS
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_first_epoch_draws_as_the_scripts_loader_does(workers, kind):
    seed_everything()
    plain, after = list(shuffled(workers, kind)), states()
    seed_everything()
    ours = list(effective(shuffled(workers, kind), 10))
    assert equal(joined(plain), joined(ours)) and states() == after


def with_few_workers(kinds, shares):
    """Parameters (workers, kind, share): workers, which take a second to start, for one of the kinds; the others are slow."""
    rows = [(workers, kind, share) for kind, share, workers in product(kinds, shares, (0, 2))]
    quick = [row for row in rows if not row[0] or row[1:] == (kinds[0], shares[-1])]
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(("workers", "kind", "share"), with_few_workers([*SAMPLERS], [10]))
def test_later_epochs_do_not_depend_on_other_draws(workers, kind, share):
    runs = []
    for dropout in (0, 5):
        seed_everything()
        loader, epochs = effective(shuffled(workers, kind), share), []
        for _ in range(3):
            epochs.append(joined(list(loader)))
            torch.rand(dropout)
        runs.append(epochs)
    for first, second in zip(*(epochs[1:] for epochs in runs)):
        assert equal(first, second) if workers else torch.equal(first[0], second[0])
    orders = [epoch[0].tolist() for epoch in runs[0]]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    if workers:  # the workers' seeds change as well
        assert not torch.equal(runs[0][1][1].sort(0).values, runs[0][2][1].sort(0).values)


@pytest.mark.parametrize(("workers", "kind", "share"), with_few_workers([*SAMPLERS], [None, 10]))
def test_later_epochs_are_the_plain_loaders_until_the_training_draws(workers, kind, share):
    seed_everything()
    source, plain = shuffled(workers, kind), []
    for _ in range(3):
        plain.append(joined(list(source)))
        torch.rand(2)  # the script's own
    seed_everything()
    drew = False
    loader, ours = effective(shuffled(workers, kind), share, apart=lambda: drew), []
    for epoch in range(3):
        ours.append(joined(list(loader)))
        torch.rand(2)
        drew = epoch == 1
    assert all(map(equal, plain[:2], ours[:2])) and plain[2][0].tolist() != ours[2][0].tolist()


@pytest.mark.parametrize(("workers", "kind", "share"), with_few_workers([*SAMPLERS, "in order"], [None, 8]))
def test_the_script_draws_what_it_would_without_memfit(workers, kind, share):
    """Between batches and between epochs, whatever those are made of: the global generators stand where they would."""
    compare_draws(workers, kind, share)


@pytest.mark.parametrize("kind", ["shuffled", "in order"])
def test_the_script_draws_what_it_would_with_workers_that_stay(kind):
    compare_draws(2, kind, 8, persistent_workers=True)


def compare_draws(workers, kind, share, **options):
    options["data"] = Numbers(24)
    seed_everything()
    plain = draws_of_epochs(shuffled(workers, kind, **options), (share or 4) // 4)
    seed_everything()
    assert draws_of_epochs(effective(shuffled(workers, kind, **options), share), 1) == plain


def draws_of_epochs(loader, every):
    """What a script draws after each step of `every` batches, and after each of three epochs, the last one left early."""
    found = []
    for epoch in range(3):
        for index, _ in enumerate(loader):
            if index % every == 0:
                found.append((torch.rand(1).item(), np.random.rand(), random.random()))
            if epoch == 2:
                break
        found.append(torch.rand(1).item())
    return found


@WORKERS
@pytest.mark.parametrize("collated", [False, True])
def test_later_epochs_draw_from_the_generators_what_a_plain_loader_would(workers, collated):
    loader, source = effective(shuffled(workers, data=Numbers(23)), 10, collated), shuffled(workers, data=Numbers(23))
    list(loader)
    before = torch.get_rng_state()
    list(loader)
    next(iter(loader))
    after = states()
    torch.set_rng_state(before)
    list(source)
    next(iter(source))
    assert states() == after


def test_a_generator_of_the_scripts_leaves_the_global_one_alone():
    loader = effective(shuffled(generator=torch.Generator()), 10)
    list(loader)
    loader = effective(shuffled(data=Numbers(23), generator=torch.Generator()), 10)
    before = states()
    for _ in range(3):
        list(loader)
    assert states() == before


def test_the_seed_determines_later_epochs():
    orders = []
    for given, seed in ((None, 0), (None, 1), (77, 0), (77, 1)):
        seed_everything(seed)
        loader = effective(shuffled(data=Numbers(23)), 10, seed=given)
        assert loader.seed == given
        list(loader)
        orders.append(read(loader))
        assert loader.seed is not None and (given is None or loader.seed == given)
    assert orders[0] != orders[1] and orders[2] == orders[3] not in orders[:2]


@WORKERS
def test_a_generator_of_the_scripts_is_left_to_itself(workers):
    seed_everything()
    source = shuffled(workers, generator=torch.Generator().manual_seed(3))
    plain = [joined(list(source))[0] for _ in range(3)]
    loader = effective(shuffled(workers, generator=torch.Generator().manual_seed(3)), 10)
    assert equal(plain, [joined(list(loader))[0] for _ in range(3)])


def test_persistent_workers_serve_every_epoch_in_its_own_order():
    epochs = []
    for dropout in (0, 3):
        seed_everything()
        loader = effective(shuffled(2, data=Pids(), persistent_workers=True), 10)
        epochs.append([])
        pids = set()
        for _ in range(3):
            batches = joined(list(loader))
            epochs[-1].append(batches[0].tolist())
            pids |= set(batches[1].tolist())
            torch.rand(dropout)
        assert len(pids) == 2
    assert epochs[0] == epochs[1]
    assert sorted(epochs[0][0]) == sorted(epochs[0][1]) and epochs[0][0] != epochs[0][1] != epochs[0][2]


class Pids(Numbers):
    """Samples that say who read them."""

    def __init__(self):
        super().__init__(23)

    def __getitem__(self, i):
        return torch.tensor(i), os.getpid()


def masking(samples):
    return torch.stack(samples), torch.rand(len(samples)), np.random.rand(), random.random()


@pytest.mark.parametrize("collated", [False, True])
def test_draws_of_the_collate_function_stay_out_of_this_process_if_they_were_a_workers(collated):
    def once():
        seed_everything()
        loader = effective(DataLoader(Numbers(12), batch_size=2, num_workers=2, collate_fn=masking), 6, collated)
        collated_as = lambda batch: (batch.uncollated.collate([3, 1]), batch.uncollated.collate([0, 2]))  # noqa: E731
        batches = [batch if collated else collated_as(batch) for batch in loader]
        return batches, states()

    (first, state), (second, _) = once(), once()
    seed_everything()
    list(DataLoader(Numbers(12), batch_size=2, num_workers=2, collate_fn=masking))
    assert states() == state
    assert str(first) == str(second)
    drawn = [part[1] for batch in first for part in ([batch] if collated else batch)]
    assert len({tuple(draws.tolist()) for draws in drawn}) == len(drawn)


def test_a_batch_collated_again_is_the_same_batch():
    loader = effective(DataLoader(Numbers(12), batch_size=2, num_workers=1, collate_fn=masking), 6, collated=False)
    batch = next(iter(loader))
    before = states()
    assert str(batch.uncollated.collate([1, 4])) == str(batch.uncollated.collate([1, 4]))
    assert states() == before


def test_draws_of_the_collate_function_are_this_processs_without_workers():
    seed_everything()
    plain, after = list(DataLoader(Numbers(12), batch_size=6, collate_fn=masking)), states()
    seed_everything()
    assert str(list(effective(DataLoader(Numbers(12), batch_size=6, collate_fn=masking), 6))) == str(plain)
    assert states() == after


# Iterating


@WORKERS
def test_breaking_off_and_beginning_again(workers):
    loader = effective(numbers(23, batch_size=4, num_workers=workers, persistent_workers=workers > 0), 6)
    for _ in range(3):
        for batch in loader:
            assert batch.tolist() == list(range(6))
            break
    assert flat(read(loader)) == list(range(23))


@WORKERS
def test_two_iterators_at_once(workers):
    loader = effective(numbers(23, batch_size=4, num_workers=workers), 10)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader)]
    assert len(pairs) == 3 and all(a == b for a, b in pairs)


def test_an_iterator_that_has_ended_stays_ended():
    loader = effective(numbers(5, batch_size=2, num_workers=1, persistent_workers=True), 4)
    iterator = iter(loader)
    assert len(iterator) == len(list(iterator)) == 2
    again = iter(loader)
    assert list(iterator) == [] and flat(read(again)) == list(range(5))


def test_workers_are_gone_after_an_iterator_is_dropped():
    import multiprocessing

    iterator = iter(effective(numbers(50, batch_size=2, num_workers=2), 4))
    next(iterator)
    assert len(multiprocessing.active_children()) == 2
    del iterator
    assert multiprocessing.active_children() == []


@WORKERS
def test_each_batch_is_announced_and_the_position_known(workers):
    infos = []
    loader = effective(numbers(10, batch_size=2, num_workers=workers), 4, on_batch=infos.append)
    assert (loader.epoch, loader.index) == (0, -1)
    for epoch in range(2):
        for index, batch in enumerate(loader):
            assert infos[-1] == BatchInfo(epoch, index, len(batch), infos[-1].waited)
            assert (loader.epoch, loader.index) == (epoch, index)
    assert len(infos) == 6 and all(info.waited > 0 for info in infos)
    with pytest.raises(AttributeError):
        loader.epoch = 3


def test_the_wait_is_the_consumers(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(Numbers):
        def __getitem__(self, i):
            now[0] += 0.02
            return super().__getitem__(i)

    infos = []
    for _ in effective(DataLoader(Slow(4), batch_size=1), 2, on_batch=infos.append):
        now[0] += 0.2
    assert [info.waited for info in infos] == [pytest.approx(0.04)] * 2


class Faulty(Numbers):
    """Sample 5 cannot be read."""

    def __getitem__(self, i):
        if i == 5:
            raise ZeroDivisionError("sample five")
        return super().__getitem__(i)


@WORKERS
def test_errors_of_the_dataset_surface_and_the_epoch_can_go_on(workers):
    iterator = iter(effective(DataLoader(Faulty(12), batch_size=2, num_workers=workers), 4))
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError, match="sample five"):
        next(iterator)
    assert next(iterator).tolist() == [6, 7, 8, 9]
    rest(iterator)


def failing(samples):
    raise ZeroDivisionError("in collate")


@WORKERS
@pytest.mark.parametrize("share", [None, 4])
def test_errors_of_the_collate_function_surface(workers, share):
    iterator = iter(effective(DataLoader(Numbers(), collate_fn=failing, num_workers=workers), share))
    with pytest.raises(ZeroDivisionError, match="in collate"):
        next(iterator)
    rest(iterator)


class Opaque(Numbers):
    """Samples that no worker can hand over."""

    def __getitem__(self, i):
        return lambda: i


def test_samples_that_cannot_be_handed_over_are_named():
    with pytest.raises(UsageError, match="cannot be pickled"):
        next(iter(effective(DataLoader(Opaque(), num_workers=1, collate_fn=len), 4)))
    assert next(iter(effective(DataLoader(Opaque(), collate_fn=len), 4))) == 4


def test_datasets_read_by_getitems():
    class Listed(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor(100 + i) for i in indices]

    class Columns(Numbers):
        def __getitems__(self, indices):
            return torch.tensor(indices)

    assert read(effective(DataLoader(Listed(4), batch_size=2), 3)) == [[100, 101, 102], [103]]
    with pytest.raises(UsageError, match="__getitems__"):
        next(iter(effective(DataLoader(Columns(4), batch_size=2), 3)))
    assert read(effective(DataLoader(Columns(4), batch_size=2, collate_fn=lambda x: x), None)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("share", [None, 4])
@pytest.mark.parametrize("collated", [False, True])
@WORKERS
def test_pinning_is_left_out_where_there_is_no_accelerator(share, collated, workers):
    if torch.cuda.is_available():
        pytest.skip("an accelerator is there")
    loader = effective(numbers(8, batch_size=2, pin_memory=True, num_workers=workers), share, collated)
    assert loader.pin_memory
    batch = next(iter(loader))
    assert not (batch if collated else batch.uncollated.collate()).is_pinned()


@pytest.mark.parametrize("collated", [False, True])
def test_what_is_pinned_is_the_collated_whole(collated, monkeypatch):
    monkeypatch.setattr("memfit.loading.loader.pinning_works", lambda: True)
    monkeypatch.setattr("memfit.loading.pinning.pinned", lambda batch: ("pinned", batch))
    loader = effective(numbers(8, batch_size=2, pin_memory=True), 4, collated)
    batches = list(loader)
    for kind, batch in batches if collated else [batch.uncollated.collate() for batch in batches]:
        assert kind == "pinned" and len(batch) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("share", [None, 4])
@pytest.mark.parametrize("collated", [False, True])
@WORKERS
def test_batches_are_pinned_on_an_accelerator(share, collated, workers):
    loader = effective(numbers(8, batch_size=2, pin_memory=True, num_workers=workers), share, collated)
    for batch in loader:
        assert (batch if collated else batch.uncollated.collate()).is_pinned()


def test_works_with_spawned_workers():
    seed_everything()
    plain = joined(list(shuffled(1)))
    seed_everything()
    ours = joined(list(effective(shuffled(1, multiprocessing_context="spawn"), 10)))
    assert equal(plain, ours)


# Memory


def test_no_more_is_held_than_the_current_effective_batch_and_a_piece():
    import weakref

    class Weighty(torch.Tensor):
        pass

    alive = weakref.WeakSet()

    class Tracked(Numbers):
        def __getitem__(self, i):
            sample = torch.tensor(i).as_subclass(Weighty)
            alive.add(sample)
            return sample

    def collate(samples):
        most.append(len(alive))
        return len(samples)

    most = []
    for _ in effective(DataLoader(Tracked(100), batch_size=4, collate_fn=collate), 10):
        most.append(len(alive))
    assert max(most) <= 12 and min(most) == 0  # what is left of a piece stays, nothing of a batch collated


def child(script, *, before=""):
    """Runs a script in a process of its own and gives its last line."""
    command = [*before.split(), sys.executable, "-c", textwrap.dedent(script)]
    path = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


BIG = """
    import os, sys, torch
    from torch.utils.data import DataLoader, Dataset
    from memfit.loading.loader import EffectiveLoader

    class Images(Dataset):
        def __len__(self):
            return 256
        def __getitem__(self, i):
            return torch.full((2**18,), float(i))  # 1 MiB

    total = os.statvfs("/dev/shm")
    assert total.f_blocks * total.f_frsize == 64 * 2**20
"""


@pytest.fixture
def small_shared_memory(tmp_path):
    """A command prefix that limits /dev/shm to 64 MB."""
    prefix = tmp_path / "limited"
    prefix.write_text('#!/bin/sh\nmount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"\n')
    prefix.chmod(0o755)
    command = f"unshare -m {prefix}"
    if shutil.which("unshare") is None or subprocess.run([*command.split(), "true"], check=False).returncode != 0:
        pytest.skip("no permission to mount a /dev/shm of 64 MB in a namespace of its own")
    return command


@pytest.mark.slow
def test_an_effective_batch_larger_than_shared_memory(small_shared_memory):
    ours = """
    for collated in (True, False):
        loader = EffectiveLoader(DataLoader(Images(), batch_size=4, num_workers=2), share=256, collated=collated)
        (batch,) = loader
        whole = batch if collated else batch.uncollated.collate()
        assert whole.shape == (256, 2**18) and torch.equal(whole[:, -1], torch.arange(256.0))
        del batch, whole
    print("all there")
    """
    assert child(BIG + ours, before=small_shared_memory) == "all there"


def test_the_same_batch_collated_by_a_worker_does_not_get_through(small_shared_memory):
    theirs = """
    try:
        list(DataLoader(Images(), batch_size=256, num_workers=2))
    except RuntimeError as error:
        print("died" if "DataLoader worker" in str(error) else error)
    """
    assert child(BIG + theirs, before=small_shared_memory) == "died"


MANY = """
    import resource, torch
    from torch.utils.data import DataLoader, Dataset
    from memfit.loading.loader import EffectiveLoader

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    class Pairs(Dataset):
        def __len__(self):
            return 4096
        def __getitem__(self, i):
            return {"x": torch.full((8,), i), "more": [torch.zeros(3), torch.ones(2)]}
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_NOFILE"), reason="needs a limit on open files")
def test_many_samples_with_few_file_descriptors():
    ours = """
    for collated in (True, False):
        loader = EffectiveLoader(DataLoader(Pairs(), batch_size=8, num_workers=2), share=4096, collated=collated)
        (batch,) = loader
        whole = batch if collated else batch.uncollated.collate()
        assert torch.equal(whole["x"][:, 0], torch.arange(4096))
    print("all there")
    """
    assert child(MANY + ours) == "all there"


@pytest.mark.slow
def test_the_same_samples_sent_as_they_are_do_not_get_through():
    theirs = """
    import torch.multiprocessing
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    try:
        held = list(DataLoader(Pairs(), batch_size=8, num_workers=2, collate_fn=list))
    except (RuntimeError, OSError) as error:
        print("died" if "open files" in str(error) or "ancdata" in str(error) else error)
    """
    assert child(MANY + theirs) == "died"


def test_collation_equals_that_of_the_script_also_in_its_strides():
    class Images(Numbers):
        def __getitem__(self, i):
            return {"image": torch.rand(4, 5, 3).permute(2, 0, 1), "name": str(i), "box": np.arange(4.0)[::-1].copy()}

    for workers in (0, 2):
        seed_everything()
        (plain,) = DataLoader(Images(8), batch_size=8, num_workers=workers)
        seed_everything()
        ours = next(iter(effective(DataLoader(Images(8), batch_size=8, num_workers=workers), 8)))
        assert ours["name"] == plain["name"] and torch.equal(ours["box"], plain["box"])
        assert torch.equal(ours["image"], plain["image"]) and ours["image"].stride() == plain["image"].stride()
        assert ours.keys() == default_collate([Images(1)[0]]).keys()


@pytest.mark.parametrize(
    ("made", "share", "expected"),
    [
        ({"batch_size": 4}, 8, 4),
        ({"batch_size": 4, "drop_last": True}, 8, 0),
        ({"batch_size": 4}, None, 0),
        ({"batch_size": 3}, None, 2),
        ({"batch_size": None}, 8, None),
        ({"batch_sampler": [[0, 1], [2]]}, 8, None),
    ],
)
def test_what_is_left_over_at_the_end_of_an_epoch(made, share, expected):
    assert leftover(DataLoader(list(range(20)), **made), share) == expected


# Trained on


@pytest.mark.parametrize("mode", ["script", "step"])
@pytest.mark.parametrize("dropout", [False, True])
def test_a_wrapped_script_trains_on_the_same_batches_in_every_epoch(mode, dropout):
    """Plain shuffling, no generator of its own. With dropout on the CPU the order of later epochs is another one."""

    def trained(wrap):
        seed_everything()
        x = torch.randn(24, 7, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(7, 8), nn.Dropout(0.1 if dropout else 0.0), nn.Linear(8, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
        loss_fn = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
        step, seen = None, []
        if wrap and mode == "step":
            run = memfit.wrap(model, optimizer, loader, loss_fn=loss_fn, micro_batch=3)
            loader, step = run.loader, run.step
        elif wrap:
            loader = memfit.wrap(model, optimizer, loader, micro_batch=3).loader
        for _ in range(3):
            for batch in loader:
                if step is not None:
                    seen.append(batch.uncollated.collate()[0])
                    step(batch)
                    continue
                seen.append(batch[0])
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
        return seen, [p.detach() for p in model.parameters()]

    (plain, wanted), (ours, found) = trained(False), trained(True)
    assert equal(plain[:3], ours[:3]) and equal(plain[3:], ours[3:]) is not dropout
    if not dropout:
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(wanted, found))
