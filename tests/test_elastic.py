"""The same run on other hardware: one order of samples on any number of processes, saved and resumed anywhere."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairwise import once
from processes import Processes
from torch import nn
from torch.optim import SGD
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import memfit

SAMPLES, TARGET = 26, 12
KINDS = (
    *("shuffled", "drop_last", "distributed", "generator", "in order", "weighted", "subset"),
    *("own replacement", "by numpy", "workers"),
)


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    found = Processes(3)
    yield found
    found.end()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Points(Dataset[Any]):
    """Samples that know their index; with `noise`, each read draws."""

    def __init__(self, dtype: torch.dtype = torch.float64, noise: bool = False, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, 3, (samples,), generator=generator)
        self.noise = noise
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.x[index] + (0.1 * torch.rand(6) if self.noise else 0.0), self.y[index], index


class ByNumpy:
    """A sampler that draws from NumPy's global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


def network(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)
        return nn.Sequential(*layers).double().to(dtype)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loader_of(kind: str, data: Dataset[Any]) -> DataLoader[Any]:
    torch.manual_seed(100)
    np.random.seed(100)
    random.seed(100)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    samplers = {
        "distributed": lambda: DistributedSampler(data, num_replicas=size, rank=rank(), seed=5),
        "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 23),
        "subset": lambda: SubsetRandomSampler(range(0, SAMPLES, 1)),
        "own replacement": lambda: RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(rank())),
        "by numpy": ByNumpy,
    }
    if kind in samplers:
        return DataLoader(data, batch_size=5, sampler=samplers[kind]())
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(8)} if kind == "generator" else {}
    if kind == "workers":
        options.update(num_workers=1, persistent_workers=True)
    options.update(batch_size=4 if kind == "fours" else 5, drop_last=kind == "drop_last")
    return DataLoader(data, shuffle=kind != "in order", **options)


class Training:
    """A script: it goes on from `load` if there is such a file, until `stop` steps are done, and saves on rank 0."""

    def __init__(self, mode: str, kind: str, micro_batch: int | str, load: str | None = None, **options: Any) -> None:
        dtype = options.get("dtype", torch.float64)
        self.mode = mode
        self.data = Points(dtype, options.get("noise", False), options.get("samples", SAMPLES))
        self.model = network(options.get("dropout", 0.0), dtype)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.source = loader_of(kind, self.data)
        self.between, self.within = options.get("between", 0), options.get("within", 0)
        settings: dict[str, Any] = {"loss_fn": loss_fn} if mode == "step" else {}
        settings = {"target_batch": TARGET, "micro_batch": micro_batch, **settings, **options.get("settings", {})}
        self.run = memfit.wrap(self.model, self.optimizer, self.source, **settings)
        self.ids: list[list[int]] = []
        self.steps = 0
        if load is not None:
            state = torch.load(load, weights_only=True)
            self.run.load_state_dict(state["run"])
            self.schedule.load_state_dict(state["schedule"])
            self.steps = state["run"]["steps"]

    def state(self) -> dict[str, Any]:
        return {"run": self.run.state_dict(), "schedule": self.schedule.state_dict()}

    def until(self, stop: int, save: str | None = None, *, everywhere: bool = False) -> None:
        """Train on; saved inside the loop, after the last step."""
        for epoch in itertools.count(self.run.loader.epoch):
            if isinstance(self.source.sampler, DistributedSampler):
                self.source.sampler.set_epoch(epoch)
            for batch in self.run.loader:
                self.step(batch)
                if self.steps == stop:
                    if save is not None and (everywhere or rank() == 0):
                        torch.save(self.state(), save.format(rank()))
                    return
            torch.rand(self.between)

    def step(self, batch: Any) -> None:
        torch.rand(self.within)
        ids = batch[2].tolist() if self.mode == "script" else [int(sample[2]) for sample in batch.uncollated]
        self.ids.append(ids[: self.run.batch_samples])  # a process without a sample has one that does not count
        if self.mode == "step":
            self.run.step(batch)
        else:
            self.optimizer.zero_grad()
            loss_fn(self.model, batch).backward()
            self.optimizer.step()
        self.schedule.step()
        self.steps += 1


def trained(
    mode: str, kind: str, micro_batch: int | str, stop: int, load: str | None = None, save: str | None = None, **options: Any
) -> tuple[list[list[int]], dict[str, torch.Tensor], list[str]]:
    """(samples of every step, the parameters at the end, what was said)."""
    everywhere = options.pop("everywhere", False)
    load = None if load is None else load.format(rank())
    training = Training(mode, kind, micro_batch, load, **options)
    training.until(stop, save, everywhere=everywhere)
    said = [event.message for event in training.run.events]
    training.run.undo()
    return training.ids, {name: value.clone() for name, value in training.model.state_dict().items()}, said


def by_options(options: dict[str, Any], *arguments: Any) -> Any:
    return trained(*arguments, **options)


def together(found: list[Any]) -> list[list[int]]:
    """The samples of every step over all processes."""
    return [list(itertools.chain(*parts)) for parts in zip(*(ids for ids, *_ in found))]


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance over all parameters."""
    a, b = (torch.cat([value.flatten().double() for value in each.values()]) for each in (one, other))
    return float((a - b).norm() / b.norm())


# The order


DRAWS = {
    "nothing drawn": {},
    "dropout": {"dropout": 0.2},
    "a data set that draws": {"noise": True},
    "the loop": {"within": 3},
    "between epochs": {"between": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["step", "script"])
@pytest.mark.parametrize("draws", DRAWS)
def test_one_order_whatever_is_drawn_by_any_plan_on_any_number_of_processes(
    mode: str, draws: str, two: Processes, three: Processes
) -> None:
    """Nine steps are three epochs."""
    wanted, _, _ = trained(mode, "shuffled", 2, 9, **DRAWS[draws])
    assert len(wanted) == 9 and wanted[0] != wanted[3] != wanted[6] != wanted[0]
    for micro_batch in (1, 5, "off"):
        assert trained(mode, "shuffled", micro_batch, 9, **DRAWS[draws])[0] == wanted
    for processes in (two, three):
        for micro_batch in (2, "off"):
            found = processes.run(by_options, DRAWS[draws], mode, "shuffled", micro_batch, 9)
            assert together(found) == wanted


@pytest.mark.parametrize("draws", ["nothing drawn", "dropout", "a data set that draws", "between epochs"])
def test_the_first_epoch_is_the_plain_scripts_and_all_are_where_nothing_draws_meanwhile(draws: str) -> None:
    options = DRAWS[draws]
    ours, _, _ = trained("script", "shuffled", 3, 9, **options)
    loader = loader_of("shuffled", data := Points(noise=options.get("noise", False)))
    model, plain = network(options.get("dropout", 0.0)), []
    for _ in range(3):
        data.read.clear()
        for x, *_ in loader:
            model(x)
        plain.append(list(data.read))
        torch.rand(options.get("between", 0))
    assert list(itertools.chain(*ours[:3])) == plain[0]
    assert (list(itertools.chain(*ours[3:6])) == plain[1]) is (draws in ("nothing drawn", "between epochs"))


# Going on


@pytest.mark.parametrize(("kind", "mode"), once(itertools.product(KINDS, ("step", "script"))))
def test_an_interrupted_epoch_goes_on_and_the_next_ones_follow(mode: str, kind: str, tmp_path: Path) -> None:
    """On one process by the same plan: bit for bit, dropout too."""
    path = str(tmp_path / "state.pt")
    for stop in (1, 3, 5):  # the end of an epoch too
        ids, wanted, _ = trained(mode, kind, 2, 8, dropout=0.2)
        trained(mode, kind, 2, stop, save=path, dropout=0.2)
        found, parameters, _ = trained(mode, kind, 2, 8, path, dropout=0.2)
        assert found == ids[stop:]
        assert apart(parameters, wanted) == 0.0


@pytest.mark.parametrize("mode", ["step", "script"])
def test_samples_that_draw_go_on_bit_for_bit_in_whole_batches_of_the_script(mode: str, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    _, wanted, _ = trained(mode, "fours", 2, 8, dropout=0.2, noise=True)
    trained(mode, "fours", 2, 4, save=path, dropout=0.2, noise=True)
    assert apart(trained(mode, "fours", 2, 8, path, dropout=0.2, noise=True)[1], wanted) == 0.0


KINDS_BY_OTHERS = ("shuffled", "distributed", "generator")
STEPS = (8, 15, 23, 30)
"""Where a run of thirty steps, three an epoch, is interrupted: in the middle, at the end and in the middle of an epoch."""


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("kind", "mode"), once(itertools.product(KINDS_BY_OTHERS, ("step", "script"))))
def test_thirty_steps_on_one_two_three_and_one_process_by_other_plans(
    kind: str, mode: str, dtype: torch.dtype, two: Processes, three: Processes, tmp_path: Path
) -> None:
    options = {"dtype": dtype}
    wanted_ids, wanted, _ = trained(mode, kind, 2, STEPS[-1], **options)
    ids: list[list[int]] = []
    load: str | None = None
    for stop, micro_batch, processes in zip(STEPS, (2, 3, 1, "off"), (None, two, three, None)):
        save = str(tmp_path / f"{stop}.pt")
        arguments = (mode, kind, micro_batch, stop, load, save)
        found = [trained(*arguments, **options)] if processes is None else processes.run(by_options, options, *arguments)
        ids += together(found)
        assert all(apart(parameters, found[0][1]) == 0.0 for _, parameters, _ in found)
        load = save
    assert ids == wanted_ids
    assert apart(found[0][1], wanted) <= (1e-12 if dtype is torch.float64 else 1e-6)


@pytest.mark.parametrize("kind", ["shuffled", "distributed", "generator"])
def test_on_two_processes_that_each_save_all_draws_go_on(kind: str, two: Processes, tmp_path: Path) -> None:
    path = str(tmp_path / "state-{}.pt")
    draws = {"dropout": 0.2}
    whole = two.run(by_options, draws, "step", kind, 2, 8)
    two.run(by_options, {**draws, "everywhere": True}, "step", kind, 2, 4, None, path)
    for (_, found, said), (_, wanted, _) in zip(two.run(by_options, draws, "step", kind, 2, 8, path), whole):
        assert apart(found, wanted) == 0.0
        assert not any("random draws" in message for message in said)


def test_on_two_processes_of_which_one_saves_the_other_draws_anew_and_says_so(two: Processes, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    draws = {"dropout": 0.2}
    whole = two.run(by_options, draws, "step", "shuffled", 2, 8)
    two.run(by_options, draws, "step", "shuffled", 2, 4, None, path)
    found = two.run(by_options, draws, "step", "shuffled", 2, 8, path)
    assert together(found) == together(whole)[4:]
    assert 0.0 < apart(found[0][1], whole[0][1]) < 0.5
    assert [any("random draws" in message for message in said) for *_, said in found] == [False, True]


def test_no_sample_of_what_is_left_out_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    trained("script", "in order", 2, 2, save=path)
    training = Training("script", "in order", 2, path)
    training.data.read.clear()
    training.until(3)
    assert training.data.read == [24, 25]


def test_a_state_is_plain_the_same_on_any_rank_and_by_any_plan(two: Processes, tmp_path: Path) -> None:
    states = []
    for name, micro_batch, processes in (("one", 2, None), ("two", 3, two)):
        path = str(tmp_path / name) + "-{}.pt"
        arguments = ({"everywhere": True}, "step", "generator", micro_batch, 5, None, path)
        _ = [by_options(*arguments)] if processes is None else processes.run(by_options, *arguments)
        states += [torch.load(path.format(i), weights_only=True)["run"] for i in range(1 if processes is None else 2)]
    loaders = [{name: value for name, value in flattened(state["loader"]).items()} for state in states]
    assert loaders[0] == loaders[1] == loaders[2]
    assert [list(state["random"]) for state in states] == [[0], [0], [1]]
    assert [state["processes"] for state in states] == [1, 2, 2]
    assert states[0].keys() == states[1].keys() and states[0]["fingerprint"] == states[1]["fingerprint"]


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        skipped = ("python", "numpy")  # each process's own; no sampler of torch's draws from them
        return {k: v for key, each in value.items() if key not in skipped for k, v in flattened(each, f"{name}/{key}").items()}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value}


# When a batch counts as done


def wrapped(mode: str = "script", kind: str = "in order", micro_batch: int = 2, **options: Any) -> Training:
    return Training(mode, kind, micro_batch, **options)


def first_batch_after(state: dict[str, Any], **options: Any) -> int:
    """The first index of the batch that comes next."""
    training = wrapped(**options)
    training.run.load_state_dict(state)
    training.until(training.steps + 1)
    return training.ids[0][0]


def test_a_batch_counts_once_it_was_trained_on() -> None:
    training = wrapped()
    batches = iter(training.run.loader)
    training.step(next(batches))
    after, batch = training.run.state_dict(), next(batches)
    assert after["loader"]["index"] == training.run.state_dict()["loader"]["index"] == 1  # at the top of an iteration
    loss_fn(training.model, batch).backward()  # as a GradScaler leaves the step out
    assert training.run.state_dict()["loader"]["index"] == 2
    with torch.no_grad():
        training.model(next(batches)[0])
    assert training.run.state_dict()["loader"]["index"] == 2
    assert first_batch_after(after) == TARGET


def test_batches_that_are_being_added_up_are_done_again() -> None:
    accumulating = {"settings": {"script_accumulation": 2}}
    training = wrapped(**accumulating)
    found = []
    for number, batch in enumerate(training.run.loader):
        loss_fn(training.model, batch).backward()
        found.append(training.run.state_dict()["loader"]["index"])
        if number % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
            found[-1] = training.run.state_dict()["loader"]["index"]
    assert found == [0, 2, 2, 4, 4]
    state = {**training.run.state_dict()}
    assert state["loader"]["epoch"] == 1 and state["loader"]["index"] == 0


def test_states_of_before_during_and_between_epochs() -> None:
    training = wrapped(kind="shuffled")
    before = training.run.state_dict()["loader"]
    assert (before["epoch"], before["index"], before["start"]) == (0, 0, None)
    training.until(3)
    last = training.run.state_dict()["loader"]
    assert (last["epoch"], last["index"]) == (0, 3)
    list(training.run.loader)
    after = training.run.state_dict()["loader"]
    assert (after["epoch"], after["index"], after["start"]) == (2, 0, None)


def test_loading_twice_and_saving_what_was_loaded_change_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    wanted, _, _ = trained("step", "shuffled", 2, 7, dropout=0.2)
    trained("step", "shuffled", 2, 4, save=path, dropout=0.2)
    training = Training("step", "shuffled", 2, path, dropout=0.2)
    again = training.run.state_dict()
    assert flattened(again["loader"]) == flattened(torch.load(path, weights_only=True)["run"]["loader"])
    training.run.load_state_dict(again)
    training.until(7)
    assert training.ids == wanted[4:]


def test_going_back_in_the_same_process() -> None:
    wanted, parameters, _ = trained("step", "generator", 2, 5, dropout=0.2)
    training = wrapped(mode="step", kind="generator", dropout=0.2)
    training.until(2)
    state = copy.deepcopy(training.run.state_dict())
    training.until(5)
    training.run.load_state_dict(state)
    training.schedule.last_epoch, training.steps = 2, 2
    training.optimizer.param_groups[0]["lr"] = 0.1 * 0.98**2
    training.until(5)
    assert training.ids[5:] == wanted[2:]
    assert apart(training.model.state_dict(), parameters) <= 1e-12


def test_without_the_rest_only_the_place_is_loaded(tmp_path: Path) -> None:
    training = wrapped(kind="shuffled")
    training.until(4)
    place = training.run.state_dict(whole=False)
    assert not {"model", "optimizer", "random"} & place.keys()
    other = wrapped(kind="shuffled")
    drawn = torch.get_rng_state()
    other.run.load_state_dict(place)
    assert apart(other.model.state_dict(), network().state_dict()) == 0.0 and torch.equal(drawn, torch.get_rng_state())
    other.until(2)
    assert other.ids == trained("script", "shuffled", 2, 6)[0][4:]


def test_switched_off_it_saves_and_loads_all_but_the_place(capsys: pytest.CaptureFixture[str]) -> None:
    training = wrapped(settings={"enabled": False})
    model, optimizer, loader = training.run
    batch = next(iter(loader))
    loss_fn(model, batch).backward()
    optimizer.step()
    state = training.run.state_dict()
    assert state["loader"] is None
    other = wrapped(settings={"enabled": False})
    other.run.load_state_dict(state)
    assert apart(other.model.state_dict(), model.state_dict()) == 0.0
    assert "the data start over" in capsys.readouterr().err


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Points()
        return (data[i] for i in range(SAMPLES))


@pytest.mark.parametrize("kind", ["stream", "plain iterable", "none"])
def test_what_has_no_place_says_so_and_the_rest_is_loaded(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    def wrap() -> tuple[nn.Module, Any]:
        model = network()
        source: Any = DataLoader(Stream(), batch_size=4) if kind == "stream" else None
        if kind == "plain iterable":
            source = [(torch.randn(TARGET, 6, dtype=torch.float64), torch.randint(0, 3, (TARGET,)))] * 3
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
        target = None if kind == "plain iterable" else TARGET
        return model, memfit.wrap(model, optimizer, source, target_batch=target, micro_batch=2)

    model, run = wrap()
    whole = torch.randn(TARGET, 6, dtype=torch.float64), torch.randint(0, 3, (TARGET,))
    batch = whole if run.loader is None else next(iter(run.loader))
    loss_fn(model, batch).backward()
    run.optimizer.step()
    state = run.state_dict()
    other, again = wrap()
    again.load_state_dict(state)
    assert apart(other.state_dict(), model.state_dict()) == 0.0 and again.stats()["step"] == 1
    words = "are not skipped, it starts over: an IterableDataset" if kind == "stream" else "the data start over"
    assert any(words in event.message for event in again.events) and words in capsys.readouterr().err
    if kind == "stream":
        assert len(next(iter(again.loader))[0]) == TARGET


# States that cannot be meant


def untouched(training: Training) -> dict[str, Any]:
    state = training.run.state_dict()
    names = ("model", "optimizer", "loader", "random", "steps", "scale")
    return copy.deepcopy({name: flattened(state[name]) for name in names})


@functools.cache
def sound() -> Any:
    training = wrapped(kind="generator")
    training.until(2)
    return copy.deepcopy(training.run.state_dict())


def damaged(change: Any) -> Any:
    state = copy.deepcopy(sound())
    change(state)
    return state


def cut(*path: str) -> Any:
    def change(state: Any) -> None:
        for name in path[:-1]:
            state = state[name]
        del state[path[-1]]

    return change


def put(value: Any, *path: Any) -> Any:
    def change(state: Any) -> None:
        for name in path[:-1]:
            state = state[name]
        state[path[-1]] = value

    return change


BAD = {
    "no state": (lambda state: state.clear(), "it has no version"),
    "later": (put(9, "version"), "a newer memfit (version 9"),
    "odd version": (put("1", "version"), "its version is '1'"),
    "without optimizer": (cut("optimizer"), "it has no 'optimizer'"),
    "without steps": (cut("steps"), "it has no 'steps'"),
    "half": (lambda state: [state.pop(name) for name in ("model", "random")], "no 'model' and no 'random'"),
    "steps": (put(-3, "steps"), "'steps' in it cannot be read"),
    "model": (cut("model", "0.weight"), "0.weight is only here"),
    "model of other shapes": (put(torch.zeros(2), "model", "0.weight"), "0.weight is (2,) torch.float32 there"),
    "model of no tensors": (put("x", "model", "0.weight"), "0.weight is str there"),
    "another model": (put("0" * 16, "fingerprint"), "another model's"),
    "optimizer": (put([], "optimizer", "param_groups"), "groups of [] parameters there"),
    "optimizer's state": (put({}, "optimizer", "state", 77), "parameter 77"),
    "no optimizer": (put(None, "optimizer"), "'optimizer' in it cannot be read"),
    "target": (put(24, "target_batch"), "saved with target_batch=24"),
    "loader": (put({}, "loader"), "'loader' in it cannot be read"),
    "epoch": (put(1.5, "loader", "epoch"), "1.5 is no count"),
    "index": (put(4, "loader", "index"), "4 batches of an epoch, and this one has 3"),
    "size": (put(6, "loader", "size"), "effective batches of 6 samples, and this one has of 12 samples"),
    "samples": (put(99, "loader", "samples"), "epochs of 99 samples, and this one has of 26 samples"),
    "start": (put(torch.zeros(3), "loader", "start", "state"), "'loader' in it cannot be read"),
    "numpy": (put({}, "loader", "start", "numpy"), "'loader' in it cannot be read"),
    "own": (put("x", "loader", "start", "own"), "'loader' in it cannot be read"),
    "random": (put({0: {"cpu": torch.zeros(4)}}, "random"), "'random' in it cannot be read"),
    "scale": (put(None, "scale"), "'scale' in it cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_state_is_refused_in_three_parts_and_nothing_of_it_is_taken(name: str) -> None:
    change, words = BAD[name]
    state = damaged(change)
    training = wrapped(kind="generator")
    training.until(1)
    before = untouched(training)
    with pytest.raises(memfit.UsageError) as raised:
        training.run.load_state_dict(state)
    assert words in raised.value.found and raised.value.asked and raised.value.next_move
    assert untouched(training) == before
    training.until(4)  # and it goes on


@pytest.mark.parametrize("state", [None, "state.pt", [1], 3])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(memfit.UsageError, match=r"not a run\.state_dict\(\)"):
        wrapped().run.load_state_dict(state)


def test_the_state_of_another_optimizer_is_refused() -> None:
    training = wrapped()
    state = training.run.state_dict()
    model = network()
    other = memfit.wrap(model, torch.optim.AdamW(model.parameters()), loader_of("in order", Points()), target_batch=TARGET)
    with pytest.raises(memfit.UsageError, match="it is another optimizer"):
        other.load_state_dict(state)


def test_own_batches_on_another_number_of_processes_are_another_batch(two: Processes) -> None:
    """Without target_batch= all processes' batches together are the batch."""
    training = wrapped(settings={"target_batch": None})
    training.until(1)
    state = copy.deepcopy(training.run.state_dict())
    for raised in two.run(loading, state, {"settings": {"target_batch": None}}):
        assert "effective batches of 5 samples, and this one has of 10 samples" in raised


def loading(state: Any, options: dict[str, Any], bad_on: int | None = None) -> str:
    """The error of loading; on `bad_on` it has no optimizer."""
    training = wrapped(**options)
    try:
        training.run.load_state_dict({**state, "optimizer": None} if rank() == bad_on else state)
    except memfit.MemfitError as error:
        changed = apart(training.model.state_dict(), network().state_dict())
        return f"{type(error).__name__}: {error} (changed by {changed})"
    finally:
        training.run.undo()
    return "loaded"


def test_a_state_that_one_process_cannot_load_is_loaded_on_none(two: Processes) -> None:
    training = wrapped()
    training.until(1)
    state = copy.deepcopy(training.run.state_dict())
    first, second = two.run(loading, state, {}, 1)
    assert first.startswith("RankFailed") and "rank 1 failed: UsageError" in first and "(changed by 0.0)" in first
    assert second.startswith("UsageError") and "(changed by 0.0)" in second
    assert two.run(loading, state, {}) == ["loaded", "loaded"]


def other_states(states: list[Any]) -> str:
    return loading(states[rank()], {})


def only_one_loads(state: Any) -> str:
    training = wrapped()
    try:
        if rank() == 0:
            training.run.load_state_dict(state)
        else:
            next(iter(training.run.loader))
    except memfit.RankFailed as error:
        return str(error)
    finally:
        training.run.undo()
    return "went on"


def test_processes_that_load_different_states_or_not_all_are_told(two: Processes) -> None:
    training, states = wrapped(), []
    for stop in (1, 2):
        training.until(stop)
        states.append(copy.deepcopy(training.run.state_dict()))
    for raised in two.run(other_states, states):
        assert "saved after 1 steps on rank 0, 2 steps on rank 1" in raised
    for raised in two.run(only_one_loads, states[0]):
        assert "is at another point in the script" in raised


def test_another_order_than_it_was_is_told_before_a_sample_is_trained_twice() -> None:
    training = wrapped(kind="distributed")
    training.until(4)
    state = copy.deepcopy(training.run.state_dict())
    other = wrapped(kind="distributed")
    other.run.load_state_dict(state)
    with pytest.raises(memfit.UsageError, match="call its set_epoch"):
        next(iter(other.run.loader))  # of epoch 0
    assert other.run.loader.epoch == 1
    state["loader"]["start"] = None
    other.run.load_state_dict(state)
    other.until(other.steps + 3)
    assert other.ids[0] == training.ids[3]
