"""A script that changes what lies inside its model's attributes between a call and its loss."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import points
from torch import Tensor, nn
from torch.optim import SGD

import memfit

X, Y = points()


class Settings:
    def __init__(self) -> None:
        self.scale, self.nested = 2.0, {"powers": [1, 2]}


GLOBALS = {"scale": 1.0}
NUMBER, HELPER = 1.0, (lambda x: x + NUMBER)


class Net(nn.Module):
    centre: Tensor
    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4).eval()).double()
        self.register_buffer("centre", torch.ones(4).double())
        self.table: Any = {"shift": 1.0, "deep": {"scale": torch.ones(4).double()}}
        self.items, self.last = [torch.ones(4).double(), 2.0], deque([1.0], maxlen=2)
        self.settings, self.space, self.plain = Settings(), SimpleNamespace(bias=0.5), torch.ones(4).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x) * self.table["deep"]["scale"] + self.centre + self.table["shift"] + self.items[0] * self.items[1]
        out = out * self.last[-1] + self.space.bias + self.plain
        out = HELPER(out) * GLOBALS["scale"] * self.shared
        return out * self.settings.scale ** self.settings.nested["powers"][0]


def set_buffer(m: Net, step: int) -> None:
    m.centre = m.centre * 2


def set_entry(m: Net, step: int) -> None:
    m.table["shift"] += step + 1


def set_deep_entry(m: Net, step: int) -> None:
    m.table["deep"]["scale"] = m.table["deep"]["scale"] * 2


def replace_list(m: Net, step: int) -> None:
    m.items[:] = [m.items[0] * 2, 3.0]


def append(m: Net, step: int) -> None:
    m.last.append(float(step))


def set_in_object(m: Net, step: int) -> None:
    m.settings.scale += 1
    m.settings.nested["powers"].reverse()


def set_in_namespace(m: Net, step: int) -> None:
    m.space.bias = step


def set_global(m: Net, step: int) -> None:
    globals()["NUMBER"] = step + 2.0


def replace_helper(m: Net, step: int) -> None:
    globals()["HELPER"] = lambda x: x * (step + 2)


def set_in_global(m: Net, step: int) -> None:
    GLOBALS["scale"] += 1


def set_class_attribute(m: Net, step: int) -> None:
    Net.shared = step + 2.0


def write_buffer(m: Net, step: int) -> None:
    m.centre.mul_(2)


def write_tensor(m: Net, step: int) -> None:
    m.plain.add_(1)


def write_item(m: Net, step: int) -> None:
    m.items[0].zero_()


def trained(change: Any, line: bool, *, after: str = "call") -> list[Any]:
    GLOBALS["scale"], Net.shared = 1.0, 1.0
    globals().update(NUMBER=1.0, HELPER=lambda x: x + NUMBER)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.01)
    if line:
        memfit.wrap(model, optimizer, micro_batch=5)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        out = model(X)
        if after == "call":
            change(model, step)
        loss = F.cross_entropy(out, Y)
        loss.backward()
        optimizer.step()
        if after == "step":
            with torch.no_grad():
                change(model, step)
        losses.append(loss.item())
    settings = model.settings
    left = model.table["shift"], *model.last, settings.scale, *settings.nested["powers"], *model.centre.tolist()
    return [*losses, *left]


SETS = [
    set_buffer, set_entry, set_deep_entry, replace_list, append, set_in_object, set_in_namespace, set_global, replace_helper,
    set_in_global, set_class_attribute,
]  # fmt: skip
WRITES = [write_buffer, write_tensor, write_item]


@pytest.mark.parametrize("change", SETS, ids=lambda each: each.__name__)
def test_what_is_set_after_the_call_does_not_reach_its_forward(change: Any) -> None:
    assert trained(change, True) == pytest.approx(trained(change, False), rel=1e-11)


@pytest.mark.parametrize("change", WRITES, ids=lambda each: each.__name__)
def test_what_is_written_in_place_after_the_call_is_refused(change: Any) -> None:
    with pytest.raises(memfit.Refused, match=r"modified by an inplace operation: \[torch.DoubleTensor \[4\]\]"):
        trained(change, True)


@pytest.mark.parametrize("change", [*SETS, *WRITES], ids=lambda each: each.__name__)
def test_between_steps_all_may_change(change: Any) -> None:
    assert trained(change, True, after="step") == pytest.approx(trained(change, False, after="step"), rel=1e-11)


def closed_over(line: bool) -> list[float]:
    scale, shifts = 1.0, [0.0]

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.act = nn.Linear(7, 4).double(), (lambda x: x + shifts[-1])

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.net(x)) * scale

    model, losses = Closed(), []
    model.net.register_forward_hook(lambda module, inputs, out: out * scale)
    optimizer = SGD(model.parameters(), lr=0.01)
    if line:
        memfit.wrap(model, optimizer, micro_batch=5)
    for _ in range(3):
        optimizer.zero_grad()
        out = model(X)
        scale += 1
        shifts.append(scale)
        loss = F.cross_entropy(out, Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, scale, *shifts]


def test_variables_of_functions_are_those_of_the_call() -> None:
    assert closed_over(True) == pytest.approx(closed_over(False), rel=1e-11)


SLOPE, COUNTED = 1.0, {"n": 0}


class Hooked(nn.Module):
    """Code of its backward reads and writes globals."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.net = nn.Linear(7, 7).double(), nn.Linear(7, 4).double()
        self.prev: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.register_hook(self.scaled)
        return self.net(h)

    def scaled(self, gradient: Tensor) -> Tensor:
        COUNTED["n"] += len(gradient)
        return gradient * SLOPE

    def unrelated(self) -> Any:
        return TOTAL


TOTAL = torch.zeros(()).double()


def hooked(line: bool) -> list[Any]:
    model, found = Hooked(), []
    globals().update(SLOPE=1.0, TOTAL=torch.zeros(()).double(), COUNTED={"n": 0})
    optimizer = SGD(model.parameters(), lr=0.1)
    if line:
        memfit.wrap(model, optimizer, micro_batch=5)
    for step in range(3):
        optimizer.zero_grad()
        out = model(X)
        globals()["SLOPE"] = step + 2.0
        COUNTED.clear()
        COUNTED.update(b=0, n=0, a=0)
        TOTAL.add_(len(X))
        F.cross_entropy(out, Y).backward()
        optimizer.step()
        found += [model.first.weight.sum().item(), COUNTED["n"]]
    return [*found, TOTAL.item()]


def test_code_of_the_backward_reads_and_writes_what_is_there_then() -> None:
    assert hooked(True) == pytest.approx(hooked(False), rel=1e-11)
    assert list(COUNTED) == ["b", "n", "a"]


@pytest.mark.parametrize("kept", ["loss", "out"])
def test_an_attribute_with_the_last_graph_does_not_keep_earlier_calls(kept: str) -> None:
    model = nn.Sequential(nn.Linear(7, 4)).double()
    held: Any = model
    optimizer, inputs = SGD(model.parameters(), lr=0.1), []
    memfit.wrap(model, optimizer, micro_batch=5)
    for _ in range(5):
        optimizer.zero_grad()
        x = X.clone()
        inputs.append(weakref.ref(x))
        out = model(x)
        loss = F.cross_entropy(out, Y)
        loss.backward()
        optimizer.step()
        held.prev = loss if kept == "loss" else out
        del x, out, loss
    gc.collect()
    assert sum(each() is not None for each in inputs) <= 1


class MakesLater(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.what = nn.Linear(7, 4).double(), what

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            if self.what == "buffer":
                self.register_buffer("made", torch.ones(4).double())
            elif self.what == "parameter":
                self.made = nn.Parameter(torch.ones(4).double())
            else:
                self.made = nn.Linear(4, 4).double()
        out = self.net(x)
        return self.made(out) if self.what == "module" else out * self.made


@pytest.mark.parametrize("what", ["buffer", "parameter", "module"])
def test_planning_leaves_nothing_of_what_a_first_forward_makes(what: str) -> None:
    found = []
    for line in (False, True):
        model = MakesLater(what)
        optimizer = SGD(model.parameters(), lr=0.1)
        if line:
            memfit.wrap(model, optimizer, micro_batch=5)
        for _ in range(2):
            torch.manual_seed(1)
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
        assert all(type(t) in (Tensor, nn.Parameter) for t in (*model.parameters(), *model.buffers()))
        found.append(model.net.weight.detach().clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_submodule() -> None:
    found = []
    for line in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(torch.jit.trace(nn.Linear(7, 8).double(), X[:2]), nn.Tanh(), nn.Linear(8, 4).double())
        if line:
            memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
        F.cross_entropy(model(X), Y).backward()
        found.append(model[2].weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-12)
