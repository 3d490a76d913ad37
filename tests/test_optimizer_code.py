"""What the code of an optimizer's `step` moves besides the parameters is moved once per step of the script: not by planning."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel

import memfit

COUNTS = {"steps": 0}


class Own(SGD):
    """An optimizer of the script, which `after` each step does something else, too."""

    steps = 0

    def __init__(self, model: nn.Module, after: Callable[[Own], object]) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.model, self.after, self.seen = model, after, deque[int](maxlen=3)
        self.array, self.draws = np.zeros(1), torch.Generator().manual_seed(3)
        self.average, self.scheduler = AveragedModel(model), CosineAnnealingLR(self, 7)
        self.numbers, self.words = np.random.default_rng(3), random.Random(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.after(self)


class Around:
    """Holds an optimizer of the script."""

    def __init__(self, inner: Own) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.inner.step()


def add(own: Own, noise: Callable[[Tensor], Tensor | float]) -> None:
    for p in own.param_groups[0]["params"]:
        p.add_(noise(p) * 0.01)


def count_in_class(own: Own) -> None:
    type(own).steps += 1
    add(own, lambda p: type(own).steps)


def count_in_global(own: Own) -> None:
    COUNTS["steps"] += 1
    add(own, lambda p: COUNTS["steps"])


def count_in_array(own: Own) -> None:
    own.array[0] += 1
    add(own, lambda p: float(own.array[0]))


def count_in_deque(own: Own) -> None:
    own.seen.append(len(own.seen))
    add(own, lambda p: sum(own.seen))


def pull_to_average(own: Own) -> None:
    own.average.update_parameters(own.model)
    add(own, lambda p: 0.0 + own.average.n_averaged.item())


AFTER: dict[str, Callable[[Own], object]] = {
    "scheduler": lambda own: own.scheduler.step(),
    "average": pull_to_average,
    "generator": lambda own: add(own, lambda p: torch.randn(p.shape, generator=own.draws, dtype=p.dtype)),
    "numpy's generator": lambda own: add(own, lambda p: own.numbers.normal()),
    "python's generator": lambda own: add(own, lambda p: own.words.random()),
    "torch's random state": lambda own: add(own, torch.randn_like),
    "numpy's random state": lambda own: add(own, lambda p: np.random.normal()),
    "python's random state": lambda own: add(own, lambda p: random.random()),
    "class attribute": count_in_class,
    "global": count_in_global,
    "array": count_in_array,
    "deque": count_in_deque,
}


def trained(what: str, around: bool, how: str) -> list[Tensor]:
    COUNTS["steps"] = Own.steps = 0
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    own = Own(model, AFTER[what])
    optimizer: Any = Around(own) if around else own
    run = None
    if how == "script":
        memfit.wrap(model, optimizer, micro_batch=3)
    elif how == "step":
        run = memfit.wrap(model, optimizer, loss_fn=lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), micro_batch=3)
    for step in range(3):
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).double(), torch.arange(7) % 3
        if run is not None:
            run.step(batch)
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return [p.detach() for p in (*model.parameters(), *own.average.parameters())]


@pytest.mark.parametrize("what", AFTER)
@pytest.mark.parametrize("around", [False, True])
def test_what_a_step_moves_is_moved_once(what: str, around: bool) -> None:
    plain = trained(what, around, "plain")
    for how in ("script", "step") if not around else ("script",):
        for p, wanted in zip(trained(what, around, how), plain, strict=True):
            assert torch.allclose(p, wanted, rtol=1e-12, atol=1e-12), how


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021), whose `step` needs a closure that most scripts never pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"radius": 0.05})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05 / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["before"])
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


def test_an_optimizer_whose_step_needs_a_closure_is_planned_for() -> None:
    def trained(*, line: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = Sharpness(model)
        run = memfit.wrap(model, optimizer, micro_batch=3) if line else None
        for _ in range(4):
            x, y = torch.randn(12, 6).double(), torch.randint(3, (12,))
            F.cross_entropy(model(x), y).backward()
            optimizer.first_step()
            F.cross_entropy(model(x), y).backward()
            optimizer.second_step()
        assert run is None or (run.plan is not None and run.plan.micro_batch == 3)
        return [p.detach() for p in model.parameters()]

    for found, want in zip(trained(line=True), trained(line=False)):
        assert torch.allclose(found, want, rtol=1e-12, atol=1e-14)
