"""Forwards that use a tensor with a graph that was computed before the call: every micro-batch would run its backward."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import memfit
from memfit import Refused


class Modulated(nn.Module):
    """A network whose features another one scales, by an attribute that the script sets."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = nn.Linear(6, 3), torch.ones(3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(*, line: bool, first: float = 0, step_mode: bool = False, saves: bool = True, **options: Any) -> list[Tensor]:
    """The parameters after 6 steps. From the step `first` on there is a graph before the call, which `saves` tensors."""
    torch.manual_seed(0)
    model, other = Modulated().double(), nn.Linear(4, 3).double()
    optimizer = SGD([*model.parameters(), *other.parameters()], 0.1)
    run = memfit.wrap(model, optimizer, loss_fn=loss_fn if step_mode else None, **options) if line else None
    for step in range(6):
        batch = torch.randn(12, 6).double(), torch.randint(3, (12,))
        if step >= first:
            model.scale = other(torch.full((4,), step / 5).double()).exp() if saves else other.bias + 1
        if run is not None and step_mode:
            run.step(batch)
            continue
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in (*model.parameters(), *other.parameters())]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("step_mode", [False, True])
def test_it_is_named_where_it_would_be_cut(step_mode: bool, first: int) -> None:
    with pytest.raises(Refused, match="uses scale with a graph that was computed before the call"):
        trained(line=True, first=first, step_mode=step_mode, micro_batch=3)


@pytest.mark.parametrize("first", [0, 3])
def test_it_runs_whole_where_that_fits(first: int) -> None:
    for found, want in zip(trained(line=True, first=first), trained(line=False, first=first)):
        assert torch.equal(found, want)


@pytest.mark.parametrize("first", [0, 3, math.inf])
def test_a_graph_that_saves_nothing_is_run_by_every_micro_batch(first: float) -> None:
    wanted = trained(line=False, first=first, saves=False)
    for found, want in zip(trained(line=True, first=first, saves=False, micro_batch=3), wanted):
        assert torch.allclose(found, want, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_hook_of_the_model_itself_runs_before_its_forward(norm: Any) -> None:
    def losses(*, line: bool) -> list[float]:
        torch.manual_seed(0)
        model = norm(nn.Linear(6, 3).double())
        optimizer = SGD(model.parameters(), 0.1)
        if line:
            memfit.wrap(model, optimizer)
        found = []
        for _ in range(4):
            loss = loss_fn(model, (torch.randn(12, 6).double(), torch.randint(3, (12,))))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(line=True) == losses(line=False)


class InThreads(nn.Module):
    """Computes in threads, whose nodes autograd counts by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies, self.head = nn.ModuleList(nn.Linear(6, 4) for _ in range(2)), nn.Linear(4, 3)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda body: torch.tanh(body(x)), self.bodies))
        return self.head(found[0] + found[1])


def test_what_other_threads_compute_is_the_forwards() -> None:
    torch.manual_seed(0)
    model = InThreads().double()
    model.kept = model.head.weight * 2
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    for _ in range(2):
        loss_fn(model, (torch.randn(12, 6).double(), torch.randint(3, (12,)))).backward()
    assert run.plan is not None and run.plan.micro_batch == 3
