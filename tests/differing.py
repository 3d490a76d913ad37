"""What processes that differ do in tests: slower ones, poorer ones, and what they then know of each other."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import memfit


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
