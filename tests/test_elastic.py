"""The same run on other hardware: one order of samples on any number of processes, saved and resumed anywhere."""

from __future__ import annotations

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
from processes import Processes
from torch import nn
from torch.optim import SGD
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
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
    return DataLoader(data, batch_size=4 if kind == "fours" else 5, shuffle=kind != "in order", drop_last=kind == "drop_last", **options)


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
        ids = batch[2].tolist() if self.mode == "script" else [int(sample[2]) for sample in batch]
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


@pytest.mark.parametrize("mode", ["step", "script"])
@pytest.mark.parametrize("kind", KINDS)
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


STEPS = (8, 15, 23, 30)
"""Where a run of thirty steps, three an epoch, is interrupted: in the middle, at the end and in the middle of an epoch."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["step", "script"])
@pytest.mark.parametrize("kind", ["shuffled", "distributed", "generator"])
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


@pytest.mark.parametrize("kind", ["shuffled", "distributed", "workers"])
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
