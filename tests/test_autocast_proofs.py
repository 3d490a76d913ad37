"""Proofs of scripts under autocast: modules compute in the precision of their parameters, so that rounding hides nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import memfit
from memfit import Refused
from memfit.engine.suspended_autocast import without_autocast
from memfit.equivalence.tolerances import full_precision

LOW = torch.bfloat16


class Net(nn.Module):
    """A network whose samples may know a little of each other. `casts`: it runs under autocast only."""

    def __init__(self, shared: float = 0.0, *, casts: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.shared, self.casts = shared, casts

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x.to(LOW) if self.casts else x))
        return self.head(h - self.shared * h.mean(0))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", LOW):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def almost_a_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", LOW):
        return (F.cross_entropy(model(batch[0]).float(), batch[1]) + 1).log()


def steps(model: nn.Module, loss: Callable[..., Tensor], *, step_mode: bool, steps: int = 3) -> memfit.Run:
    torch.manual_seed(0)
    optimizer = SGD(model.parameters(), 0.1)
    run = memfit.wrap(model, optimizer, micro_batch=3, loss_fn=loss if step_mode else None)
    for _ in range(steps):
        batch = torch.randn(12, 6), torch.randint(3, (12,))
        if step_mode:
            run.step(batch)
            continue
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run


@pytest.mark.parametrize("step_mode", [False, True])
def test_samples_that_know_a_little_of_each_other_are_found(step_mode: bool) -> None:
    with pytest.raises(Refused, match="mixes samples"):
        steps(Net(0.03), loss_fn, step_mode=step_mode)


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("step_mode", [False, True])
def test_others_are_cut_also_if_they_run_under_autocast_only(step_mode: bool, casts: bool) -> None:
    run = steps(Net(casts=casts), loss_fn, step_mode=step_mode)
    assert run.plan is not None and run.plan.micro_batch == 3
    loose = any("proven to" in event.message for event in run.events)
    assert loose == casts


class Casts(Net):
    """Rounds to half precision by itself, which no autocast explains."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(LOW) @ self.body.weight.to(LOW).T
        return self.head(torch.tanh(h.to(self.head.weight.dtype)))


@pytest.mark.parametrize("step_mode", [False, True])
def test_rounding_of_the_models_own_casts_is_no_mixing(step_mode: bool) -> None:
    run = steps(Casts(), loss_fn, step_mode=step_mode)
    assert run.plan is not None and run.plan.micro_batch == 3
    run = steps(Casts(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), step_mode=step_mode)
    assert run.plan is not None and run.plan.micro_batch == 3


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.02 * x.mean(0)


def test_a_module_that_mixes_a_little_may_be_allowed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), Mixing(), nn.Linear(16, 3))
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3, allow_inexact=["1"])
    loss_fn(model, (torch.randn(12, 6), torch.randint(3, (12,)))).backward()
    assert any(event.kind == "not equal" for event in run.events)


def test_other_threads_keep_their_autocast() -> None:
    found: list[torch.dtype] = []

    def other() -> None:
        with torch.autocast("cpu", LOW):
            found.append(nn.Linear(2, 2)(torch.ones(1, 2)).dtype)

    def prove() -> None:
        with full_precision(torch.device("cpu")), torch.autocast("cpu", LOW):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            found.append(nn.Linear(2, 2)(torch.ones(1, 2)).dtype)

    without_autocast(prove)
    assert found == [LOW, torch.float32]


def test_a_loss_that_is_almost_a_mean_is_none() -> None:
    run = steps(Net(), almost_a_mean, step_mode=True)
    assert any("needs all samples together" in event.message for event in run.events)


def test_a_proof_without_autocast_leaves_it_as_it_was() -> None:
    seen: list[Any] = []

    def prove() -> None:
        seen.append(torch.is_autocast_enabled("cpu"))

    with torch.autocast("cpu", LOW):
        without_autocast(prove)
        assert torch.is_autocast_enabled("cpu")
    with pytest.raises(ZeroDivisionError):
        without_autocast(lambda: 1 / 0)
    assert seen == [True]
