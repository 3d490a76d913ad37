"""Optimizers around other ones: their steps are followed as those of torch's own."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_idioms import Lookahead, Scaled, SlowByParameter
from torch import Tensor, nn
from torch.optim import SGD

import memfit


class Pair(Scaled):
    """It steps one optimizer after the other."""

    def __init__(self, inner: Any) -> None:
        first, *others = inner.param_groups[0]["params"]
        super().__init__(inner)
        self.both = SGD([first], lr=0.1), SGD(others, lr=0.1)
        del self.inner

    param_groups = property(lambda self: [group for each in self.both for group in each.param_groups])
    state = property(lambda self: {p: held for each in self.both for p, held in each.state.items()})

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()

    def step(self) -> None:
        for each in self.both:
            each.step()


AROUND: dict[str, Callable[[Any], Any]] = {
    "without the base's __init__": Lookahead,
    "moves weights after the step": SlowByParameter,
    "no Optimizer": Scaled,
    "no Optimizer, of two": Pair,
}
around = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


def made(around: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, around(SGD(model.parameters(), lr=0.1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(7, 6, generator=generator).double(), torch.randint(0, 3, (7,), generator=generator)


def read_after_the_step(around: Callable[[Any], Any], line: bool) -> list[float]:
    """An output that no loss used is of the parameters before the step."""
    model, optimizer = made(around)
    if line:
        memfit.wrap(model, optimizer, micro_batch=2)
    found = []
    for step in range(3):
        x, y = batch(step)
        unused = model(x)
        F.cross_entropy(model(x + 1), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(unused.square().mean().item())
    return found


@around
def test_an_output_is_read_after_the_step(around: Callable[[Any], Any]) -> None:
    assert read_after_the_step(around, True) == pytest.approx(read_after_the_step(around, False), rel=1e-12)


@around
@pytest.mark.parametrize("mode", ["script", "step"])
def test_steps_are_counted(around: Callable[[Any], Any], mode: str) -> None:
    model, optimizer = made(around)
    loss_fn = (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])) if mode == "step" else None
    run = memfit.wrap(model, optimizer, micro_batch=2, loss_fn=loss_fn)
    for step in range(3):
        if mode == "step":
            run.step(batch(step))
        else:
            F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
    assert run.state_dict(whole=False)["steps"] == 3


@around
def test_undone_and_copied_they_are_plain(around: Callable[[Any], Any]) -> None:
    model, optimizer = made(around)
    before = set(vars(optimizer))
    run = memfit.wrap(model, optimizer, micro_batch=2)
    if not isinstance(optimizer, torch.optim.Optimizer):  # (others cannot be copied without the base's `__init__`)
        for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            each.step()
    assert run.state_dict(whole=False)["steps"] == 0
    run.undo()
    assert set(vars(optimizer)) - before <= {"_opt_called"}
    memfit.wrap(model, optimizer, micro_batch=2)
    again = memfit.wrap(model, optimizer, micro_batch=2)  # which undoes the first
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    assert again.state_dict(whole=False)["steps"] == 1


@pytest.mark.parametrize("first", ["scheduler", "wrap"])
def test_schedulers_count_steps_as_before(first: str) -> None:
    model, optimizer = made(Lookahead)

    def scheduled() -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    scheduler = scheduled() if first == "scheduler" else None
    run = memfit.wrap(model, optimizer, micro_batch=2)
    scheduler = scheduler or scheduled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of schedulers that step before their optimizer
        for step in range(2):
            F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
            scheduler.step()
    assert run.state_dict(whole=False)["steps"] == 2 and optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    run.undo()
    optimizer.step()
    scheduler.step()


class EverySecond(Lookahead):
    """It steps the optimizer that it holds every second time, as accelerate does in `accumulate`."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.asked = 0

    def step(self, closure: Any = None) -> Any:
        self.asked += 1
        return self.optimizer.step(closure) if self.asked % 2 == 0 else None


def test_steps_that_do_not_happen_are_not_counted() -> None:
    model, optimizer = made(EverySecond)
    run = memfit.wrap(model, optimizer, micro_batch=2)
    for step in range(4):
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    assert run.state_dict(whole=False)["steps"] == 2


def test_undone_hooks_of_a_wrapper_leave_nothing_behind() -> None:
    model, optimizer = made(Pair)
    run = memfit.wrap(model, optimizer, micro_batch=2)
    assert "step" in vars(optimizer)
    run.undo()
    assert "step" not in vars(optimizer)


def test_a_copy_of_a_hooked_wrapper_is_followed_anew() -> None:
    model, optimizer = made(Pair)
    memfit.wrap(model, optimizer, micro_batch=2)
    model, optimizer = copy.deepcopy((model, optimizer))
    run = memfit.wrap(model, optimizer, micro_batch=2)
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    assert run.state_dict(whole=False)["steps"] == 3
