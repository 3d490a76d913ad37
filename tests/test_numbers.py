"""Numbers that decide what a forward or a loss does: attributes that a script sets, settings, globals."""

from __future__ import annotations

import argparse
import enum
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import memfit
from memfit.engine.call_attributes import Attributes
from memfit.engine.forward_reads import ForwardReads
from memfit.engine.modules import modules_of
from memfit.engine.read_numbers import MOST, Numbers, Variants

STAGE = 0


class Task(enum.Enum):
    FIRST, SECOND = 1, 2


OTHERS: dict[str, tuple[Any, Any]] = {
    "enum": (Task.FIRST, Task.SECOND),
    "tuple": ((0, 1), (1, 1)),
    "set": (frozenset(), frozenset(("second",))),
    "dtype": (torch.float32, torch.float64),
    "numpy": (np.int64(3), np.int64(4)),
    "class": (nn.ReLU, nn.GELU),
}


def first_head() -> int:
    return 0


def second_head() -> int:
    return 1


class Staged(nn.Module):
    """Does something else at each stage, wherever that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 4), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 1)])
        self.stage, self.calls, self.table, self.settings = 0, 0, {"stage": 0}, SimpleNamespace(stage=0)
        self.rate, self.others = 0.0, dict[str, Any]()
        self.register_buffer("flag", torch.zeros((), dtype=torch.long))
        self.task, self.listed, self.weighted = first_head, [0], functools.partial(int, 0)
        self.double()

    def set(self, where: str, stage: int) -> None:
        if where in OTHERS:
            self.others[where] = OTHERS[where][stage]
        elif where == "buffer":
            self.flag.fill_(stage)
        elif where == "function":
            self.task = second_head if stage else first_head
        elif where == "list":
            self.listed[0] = stage
        elif where == "partial":
            self.weighted = functools.partial(int, stage)
        elif where == "attribute":
            self.stage = stage
        elif where == "table":
            self.table["stage"] = stage
        elif where == "object":
            self.settings.stage = stage
        elif where == "rate":
            self.rate = stage / 2
        else:
            globals()["STAGE"] = stage

    def now(self) -> int:
        told = [OTHERS[name].index(value) for name, value in self.others.items()]
        told += [self.flag.item(), self.task(), self.listed[0], self.weighted()]
        return max(self.stage, self.table["stage"], self.settings.stage, STAGE, int(self.rate > 0), *told)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.body(x))
        return self.heads[self.now()](h)


class Mixing(Staged):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.heads[0](h - h.mean(0) if self.now() else h)


def loss_of(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.arange(len(out)) % 3) if out.shape[1] > 1 else out.square().sum()


WHERE = ("attribute", "table", "object", "rate", "global", "buffer", "function", "list", "partial", *OTHERS)


@pytest.fixture(autouse=True)
def _at_first() -> Any:
    yield
    globals()["STAGE"] = 0


def losses(where: str, stages: Sequence[int], mode: str, counted: bool = False) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = Staged()
    optimizer = SGD(model.parameters(), 0.1)
    run = None
    if mode == "step":
        run = memfit.wrap(model, optimizer, loss_fn=lambda m, x: loss_of(m(x)), micro_batch=3)
    elif mode == "script":
        memfit.wrap(model, optimizer, micro_batch=3)
    found = []
    for step, stage in enumerate(stages):
        model.set(where, stage)
        if counted:
            model.step = step  # type: ignore[assignment]
        x = torch.randn(8, 6).double()
        if run is not None:
            found.append(run.step(x).item())
            continue
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, model.calls


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", ["script", "step"])
def test_another_stage_is_another_kind_of_call(where: str, mode: str) -> None:
    stages = [0, 0, 1, 0, 1, 1, 0]
    (found, calls), (want, wanted) = losses(where, stages, mode), losses(where, stages, "plain")
    assert found == pytest.approx(want, rel=1e-12)
    assert calls == wanted


@pytest.mark.parametrize("mode", ["script", "step"])
def test_a_counter_beside_the_stage_changes_nothing(mode: str) -> None:
    stages = [0, 1] * 8
    (found, _), (want, _) = losses("attribute", stages, mode, counted=True), losses("attribute", stages, "plain", counted=True)
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", ["script", "step"])
def test_a_stage_that_mixes_samples_is_refused_at_once(where: str, mode: str) -> None:
    model = Mixing()
    optimizer = SGD(model.parameters(), 0.1)
    run: Any = None
    if mode == "step":
        run = memfit.wrap(model, optimizer, loss_fn=lambda m, x: loss_of(m(x)), micro_batch=3)
    else:
        memfit.wrap(model, optimizer, micro_batch=3)
    train: Callable[[], Any] = (lambda: run.step(X)) if mode == "step" else lambda: loss_of(model(X)).backward()
    for _ in range(2):
        train()
    model.set(where, 1)
    with pytest.raises(memfit.Refused, match="mixes samples"):
        train()


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()


def test_a_stage_is_looked_at_where_the_script_cuts_its_batches_itself() -> None:
    def pieces_of(batch: Any, sizes: list[int]) -> list[Any]:
        return [((piece,), {}) for piece in batch[0][0].split(sizes)]

    model = Mixing()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3, split=pieces_of)
    for _ in range(2):
        loss_of(model(X)).backward()
    model.stage = 1
    with pytest.raises(memfit.Refused, match="mixes samples"):
        model(X)


def test_what_changes_all_the_time_without_deciding_is_no_longer_watched() -> None:
    variants, asked = Variants(), []

    def does_the_same(variant: int) -> bool:
        asked.append(variant)
        return True

    for step in range(3 * MOST):
        numbers = Numbers({"step": step, "stage": 0}, {}, {}, set())
        if variants.of(numbers) is None:
            assert variants.choose(numbers, does_the_same) == 0
    assert len(asked) == MOST + 1
    other = Numbers({"step": 100, "stage": 1}, {}, {}, set())
    assert variants.of(other) is None
    assert variants.choose(other, lambda variant: False) == 1
    assert variants.of(Numbers({"step": 200, "stage": 1}, {}, {}, set())) == 1
    assert variants.of(Numbers({"step": 300, "stage": 0}, {}, {}, set())) == 0
    assert variants.of(Numbers({"step": 300}, {"stage": None}, {}, set())) == 1


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.net(x)
        return self.last


def test_a_larger_call_that_runs_whole_holds_nothing_of_the_one_before() -> None:
    model = Keeps()
    memfit.wrap(model, SGD(model.parameters(), 0.1))
    loss_of(model(X[:3])).backward()
    assert model.last is not None
    before = weakref.ref(model.last)
    loss_of(model(X)).backward()
    assert before() is None


def trained(make: Callable[[], nn.Module], loss: Callable[[Any, int], Tensor], line: bool, sizes: Sequence[int]) -> list[float]:
    torch.manual_seed(0)
    model = make()
    optimizer = SGD(model.parameters(), 0.1)
    if line:
        memfit.wrap(model, optimizer, micro_batch=3)
    found = []
    for step, size in enumerate(sizes):
        model.task = step % 2  # type: ignore[assignment]
        value = loss(model(torch.randn(size, 6, generator=torch.Generator().manual_seed(step)).double()), size)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found += [value.item(), *(buffer.sum().item() for buffer in model.buffers())]
    return [*found, *(p.sum().item() for p in model.parameters())]


class InTurn(nn.Module):
    """At every other step it reduces otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.task = nn.Linear(6, 4), nn.Linear(4, 3), 0
        self.register_buffer("seen", torch.zeros(4))
        self.double()

    def reduced(self, value: Tensor) -> Tensor:
        return value.sum(0) if self.task else value.mean(0)


class OwnLoss(InTurn):
    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.tanh(self.first(x)))
        return self.reduced(F.cross_entropy(out, (x[:, 0] > 0).long(), reduction="none"))


class Beside(InTurn):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.second(h), self.reduced(h.square()).sum()


class Tracks(InTurn):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            self.seen.copy_(self.reduced(h))
        return self.second(h), h.new_zeros(())


class Detaches(InTurn):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.second(h), h if self.task else h.detach()


@pytest.mark.parametrize("make", [OwnLoss, Beside, Tracks, Detaches])
def test_each_of_two_tasks_in_turn_is_reduced_its_own_way(make: Callable[[], nn.Module]) -> None:
    def loss(out: Any, size: int) -> Tensor:
        return out if isinstance(out, Tensor) else F.cross_entropy(out[0], torch.arange(size) % 3) + out[1].mean()

    found, wanted = (trained(make, loss, line, [8] * 6) for line in (True, False))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_a_number_that_changes_at_a_batch_of_one_sample_is_proven_later() -> None:
    def loss(out: Any, size: int) -> Tensor:
        return out

    found, wanted = (trained(OwnLoss, loss, line, [8, 1, 8, 8, 1, 8]) for line in (True, False))
    assert found == pytest.approx(wanted, rel=1e-12)


class ByArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()

    def forward(self, x: Tensor, settings: argparse.Namespace) -> Tensor:
        out = self.net(x)
        return out - out.mean(0) if settings.centred else out


def test_a_setting_in_an_argument_is_looked_at() -> None:
    model = ByArgument()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    for _ in range(2):
        loss_of(model(X, argparse.Namespace(centred=False))).backward()
    with pytest.raises(memfit.Refused, match="mixes samples"):
        model(X, argparse.Namespace(centred=True))


def test_a_hook_that_is_registered_later_is_looked_at() -> None:
    model = Keeps()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    for _ in range(2):
        loss_of(model(X)).backward()
    handle = model.net.register_forward_hook(lambda module, args, out: out - out.mean(0))
    with pytest.raises(memfit.Refused, match="mixes samples"):
        model(X)
    handle.remove()
    loss_of(model(X)).backward()


class Looks(nn.Module):
    """Decides by its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.activation = nn.Linear(6, 3), nn.Tanh()
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.net(x))
        return out - out.mean(0) if self.shift is None or not self.scale.requires_grad else out


class Centred(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def centres(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
    return out - out.mean(0) if isinstance(module, nn.Linear) else None


def unit(module: nn.Module, *gradients: Any) -> Any:
    return (gradients[0][0] / gradients[0][0].norm(),)


CHANGES: dict[str, Callable[[Looks], Any]] = {
    "frozen": lambda model: model.scale.requires_grad_(False),
    "without a parameter": lambda model: setattr(model, "shift", None),
    "class": lambda model: setattr(model.activation, "__class__", Centred),
    "hook of all modules": lambda model: torch.nn.modules.module.register_module_forward_hook(centres),
    "backward hook": lambda model: model.activation.register_full_backward_hook(unit),
    "backward pre-hook": lambda model: model.activation.register_full_backward_pre_hook(unit),
}


@pytest.mark.parametrize("mode", ["script", "step"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_script_changes_later_is_looked_at(change: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Looks()
    optimizer = SGD(model.parameters(), 0.1)
    loss_fn = {"loss_fn": lambda m, x: loss_of(m(x))} if mode == "step" else {}
    run = memfit.wrap(model, optimizer, micro_batch=3, **loss_fn)

    def step() -> None:
        if mode == "step":
            run.step(X)
            return
        loss_of(model(X)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(6):
        step()
    handle = CHANGES[change](model)
    try:
        with pytest.raises(memfit.Refused, match="mixes samples"):
            step()
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def test_freezing_changes_nothing_that_is_cut() -> None:
    model = Keeps()
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    for trained in (True, False, True, False):
        model.net.bias.requires_grad_(trained)
        loss_of(model(X)).backward()
    assert [event.kind for event in run.events] == ["plan"]


def test_classes_of_a_script_are_not_kept_alive() -> None:
    def use() -> weakref.ref[type]:
        class Setting:
            pass

        model = Staged()
        model.others["setting"] = Setting()
        model.others["kind"] = Setting
        Attributes(modules_of(model), ForwardReads()).numbers(frozenset())
        return weakref.ref(Setting)

    kept = use()
    gc.collect()
    assert kept() is None
