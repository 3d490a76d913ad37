"""What processes that differ do in tests: slower ones, poorer ones, and what they then know of each other."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import Aside
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.autotune.planner import Planner


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Sleeps(nn.Module):
    """Takes time for each sample, in forwards that train."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not isinstance(x, torch._subclasses.fake_tensor.FakeTensor):
            time.sleep(self.seconds * len(x))
        return x


@dataclass(frozen=True)
class Setting:
    """A training of processes that differ."""

    mode: str = "step"
    seconds: tuple[float, ...] = (0.0, 0.0)
    """Each takes so long for a sample."""
    target: int = 16
    steps: int = 40
    samples: int = 160
    workers: int = 0
    micro_batch: int | str = 4
    double: bool = True
    budgets: tuple[Any, ...] = (None, None, None)
    width: int = 16
    shuffle: bool = True


@dataclass(frozen=True)
class Ended:
    """What a process has come to."""

    parameters: dict[str, torch.Tensor]
    shares: list[tuple[int, ...]]
    """After each step, of every process."""
    loaded: list[int]
    """Samples of each batch on this process."""
    plan: str
    """The plan of all, without what is this process's own."""
    messages: list[str]
    report: str
    page: str
    statistics: dict[str, Any]


def network(setting: Setting) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wide = setting.width
        slow = Sleeps(setting.seconds[rank()] if "RANK" in os.environ else 0.0)
        found = nn.Sequential(nn.Linear(6, wide), nn.Tanh(), slow, nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 3))
        return found.double() if setting.double else found


def loader(setting: Setting) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float64 if setting.double else torch.float32
    numbers = torch.randn(setting.samples, 6, generator=generator, dtype=dtype)
    data = TensorDataset(numbers, torch.randint(0, 3, (setting.samples,), generator=generator))
    torch.manual_seed(100 + 7 * rank())
    workers: dict[str, Any] = {"num_workers": setting.workers, "prefetch_factor": 2} if setting.workers else {}
    return DataLoader(data, batch_size=4, shuffle=setting.shuffle, **workers)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(setting: Setting) -> Ended:
    """A training on every process."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    model = network(setting)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    more: dict[str, Any] = {"loss_fn": loss_fn} if setting.mode == "step" else {}
    run = memfit.wrap(
        model, optimizer, loader(setting), target_batch=setting.target, micro_batch=setting.micro_batch,
        budget=setting.budgets[rank()], **more,
    )
    shares: list[tuple[int, ...]] = []
    loaded: list[int] = []
    while len(shares) < setting.steps:
        for batch in run.loader:
            if setting.mode == "step":
                run.step(batch)
            else:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
            assert run.plan is not None
            shares.append(run.plan.shares)
            loaded.append(run.batch_samples or 0)
            if len(shares) == setting.steps:
                break
    assert run.plan is not None
    report = run.report() if rank() == 0 else None  # on rank 0 alone
    found = Ended(
        {name: value.clone() for name, value in model.state_dict().items()},
        shares,
        loaded,
        repr(run.plan.ranks),
        [event.message for event in run.events],
        str(report),
        report.to_html() if isinstance(report, memfit.Report) else "",
        run.stats(),
    )
    run.undo()
    return found


def with_little_room_on(poor: int, mode: str) -> tuple[list[str], list[str], list[float]]:
    """(precisions of all after some steps, what was said, some parameters) where on one rank nothing fits in float32."""
    setting = Setting(mode, double=False)
    search = Planner._search

    def searched(self: Planner, task: Any, profile: Any) -> Any:
        if rank() == poor and not profile.precision_is_lever:
            raise memfit.DoesNotFit("a batch", found="little room", next_move="take another one")
        return search(self, task, profile)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Planner, "_search", searched)
        model = network(setting)
        optimizer = SGD(model.parameters(), lr=0.1)
        more: dict[str, Any] = {"loss_fn": loss_fn} if mode == "step" else {}
        run = memfit.wrap(model, optimizer, loader(setting), target_batch=16, micro_batch=4, **more)
        for batch in itertools.islice(run.loader, 4):
            if mode == "step":
                run.step(batch)
            else:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
    assert run.plan is not None
    found = [each.precision for each in run.plan.ranks]
    said = [event.message for event in run.events]
    run.undo()
    return found, said, next(model.parameters()).flatten()[:8].tolist()


def asked_differently() -> str:
    setting = Setting()
    model = network(setting)
    try:
        memfit.wrap(
            model, SGD(model.parameters(), lr=0.1), loader(setting), target_batch=16, precision="bfloat16" if rank() else "off"
        )
    except memfit.UsageError as error:
        return str(error)
    return "wrapped"


class RunsOut(nn.Module):
    """Out of memory, once."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = Aside(value=False)  # (what changes is tried on the batch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed.value and torch.is_grad_enabled():
            self.armed.value = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x


def running_out_on(which: int) -> tuple[str, list[str]]:
    setting, fails = Setting(), RunsOut()
    model = nn.Sequential(nn.Linear(6, 8), fails, nn.Linear(8, 3)).double()
    run = memfit.wrap(
        model, SGD(model.parameters(), lr=0.1), loader(setting), target_batch=16, micro_batch=4, loss_fn=loss_fn
    )
    for number, batch in enumerate(run.loader):
        fails.armed.value = number == 5 and rank() == which
        run.step(batch)
    report = str(run.report()) if rank() == 0 else ""
    messages = [event.message for event in run.events]
    run.undo()
    return report, messages


def by_file(path: str) -> tuple[memfit.Plan, tuple[int, ...]]:
    """A plan of all, saved by rank 0, its shares and micro-batches changed by hand, and used."""
    setting = Setting()

    def wrapped(plan: Any) -> memfit.Run:
        model = network(setting)
        return memfit.wrap(
            model, SGD(model.parameters(), lr=0.1), loader(setting), target_batch=16, loss_fn=loss_fn, plan=plan
        )

    run = wrapped(None)
    assert run.plan is not None
    if rank() == 0:
        data = json.loads(run.plan.to_json())
        for each, share, micro in zip(data["ranks"], (11, 5), (4, 2)):
            each.update(share=share, micro_batch=micro, accumulation=-(-share // micro))
        Path(path).write_text(json.dumps(data))
    dist.barrier()
    run.undo()
    run = wrapped(path)
    for batch in run.loader:
        run.step(batch)
    assert run.plan is not None
    plan, found = run.plan, (run.batch_samples or 0,)
    counts = [None] * 2
    dist.all_gather_object(counts, found[0])
    run.undo()
    return _of_all(plan), tuple(counts)  # type: ignore[arg-type]


def _of_all(plan: memfit.Plan) -> memfit.Plan:
    """What is the same in the plans of all."""
    return plan.on_rank(0, len(plan.ranks))
