"""A script that changes its model between a call and its backward: the call was made with what the model was then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import points, unseen, wrapped
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim import SGD
from torch.overrides import TorchFunctionMode
from zoo.plain import gradients_of, relative_error

import memfit
from memfit.engine.call_attributes import CallAttributes
from memfit.engine.forward_reads import ForwardReads
from memfit.engine.planning_scope import is_planning

X, Y = points()


class Net(nn.Module):
    """Reads attributes of several types in its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Dropout(0.0))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
        self.task, self.scale, self.flips, self.width = "a", 1.0, False, 8
        self.mask: Tensor | None = None
        self.calls = 0
        self.settings = {"power": 1}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.body(x)
        h = F.pad(h[:, : self.width], (0, 8 - self.width)) * self.scale
        h = h if self.mask is None else h * self.mask
        out = self.heads[self.task](h.flip(1) if self.flips else h) ** self.settings["power"]
        return out + torch.tensor(0.1)


def with_attribute(name: str, value: Any) -> Callable[[Net], Callable[[], None]]:
    def change(model: Net) -> Callable[[], None]:
        before = getattr(model, name)
        setattr(model, name, value)
        return lambda: setattr(model, name, before)

    return change


def other_rate(model: Net) -> Callable[[], None]:
    """Every value is dropped, so that no draw decides."""
    model.body[2].p = 1.0
    return lambda: setattr(model.body[2], "p", 0.0)


def hooked(model: Net) -> Callable[[], None]:
    return model.body[1].register_forward_hook(lambda module, args, out: out * 0.5).remove


def pre_hooked(model: Net) -> Callable[[], None]:
    return model.body[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)).remove


def other_layer(model: Net) -> Callable[[], None]:
    before, model.body[1] = model.body[1], nn.ReLU()
    return lambda: setattr(model.body, "1", before)


def other_default(model: Net) -> Callable[[], None]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


CHANGES: dict[str, Callable[[Net], Callable[[], None]]] = {
    "str": with_attribute("task", "b"),
    "float": with_attribute("scale", 0.5),
    "bool": with_attribute("flips", True),
    "int": with_attribute("width", 4),
    "tensor": with_attribute("mask", torch.arange(8.0).double()),
    "settings": with_attribute("settings", {"power": 3}),
    "rate": other_rate,
    "hook": hooked,
    "pre-hook": pre_hooked,
    "layer": other_layer,
    "default dtype": other_default,
}


@contextmanager
def changed(model: Net, change: Callable[[Net], Callable[[], None]]) -> Iterator[None]:
    undo = change(model)
    try:
        yield
    finally:
        undo()


def after_the_call(model: Net, change: Callable[[Net], Callable[[], None]]) -> Tensor:
    with changed(model, change):
        out = model(X)
    return F.cross_entropy(out, Y)


def two_losses(model: Net, change: Callable[[Net], Callable[[], None]]) -> Tensor:
    first = model(X)
    with changed(model, change):
        second = model(X)
    return F.cross_entropy(first, Y) + F.cross_entropy(second, Y)


def one_loss_of_two(model: Net, change: Callable[[Net], Callable[[], None]]) -> Tensor:
    with changed(model, change):
        teacher = model(X)
    return F.mse_loss(model(X), teacher.detach()) + F.cross_entropy(teacher, Y)


def in_two_passes(model: Net, change: Callable[[Net], Callable[[], None]]) -> Tensor:
    with changed(model, change):
        out = model(X)
    return unseen(out).square().mean()


@pytest.mark.parametrize("loss", [after_the_call, two_losses, one_loss_of_two, in_two_passes])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_runs_with_what_the_model_was_then(change: Any, loss: Any) -> None:
    found, numbers = [], []
    for wrap in (False, True):
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        if wrap:
            wrapped(model, 5, optimizer=optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model, change)
            value.backward()
            numbers.append(value.item())
            optimizer.step()
        assert (model.task, model.scale, model.calls) == ("a", 1.0, 3 if loss in (after_the_call, in_two_passes) else 6)
        found.append({**{name: p.detach() for name, p in model.named_parameters()}, **gradients_of(model)})
    assert relative_error(found[1], found[0]) <= 1e-12
    assert numbers[:3] == pytest.approx(numbers[3:], rel=1e-12)


@pytest.mark.parametrize("which", ["both", "second"])
def test_joined_calls_run_each_with_what_the_model_was_then(which: str) -> None:
    """(The model above counts its calls, so that its calls are not joined.)"""
    found = []
    for line in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        optimizer = SGD(model.parameters(), lr=0.1)
        if line:
            wrapped(model, 5, optimizer=optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            first = None if which == "both" else model(X)
            handle = model[2].register_forward_hook(lambda module, args, out: out * 0.5)
            out = (model(X) if first is None else first) + 0.5 * model(X.flip(1))
            handle.remove()
            loss = F.cross_entropy(out, Y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert found[3:] == pytest.approx(found[:3], rel=1e-12)


class Keeps(nn.Module):
    """Keeps what it returns, as pix2pix does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(7, 7).double()

    def forward(self, x: Tensor) -> Tensor:
        self.fake = self.net(x)
        return self.fake

    def loss(self) -> Tensor:
        return F.l1_loss(self.fake, X)


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_loss_of_an_attribute_that_holds_the_output(ran_before: bool) -> None:
    found = []
    for wrap in (False, True):
        model = Keeps()
        if ran_before:
            model(X)
        if wrap:
            wrapped(model, 5)
        for _ in range(2):
            model(X)
            model.loss().backward()
        shape = model.fake.detach().shape
        found.append(({**gradients_of(model)}, shape, float(model.fake.detach().sum())))
    assert relative_error(found[1][0], found[0][0]) <= 1e-12
    assert found[0][1] == found[1][1] and found[1][2] == pytest.approx(found[0][2], rel=1e-12)


class Counter:
    steps = 0


class Counts(nn.Module):
    """Its forward changes what it is given."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.net, self.what = nn.Linear(7, 4).double(), what

    def forward(self, x: Tensor, counter: Counter, table: dict[str, int], total: Tensor) -> Tensor:
        match self.what:
            case "attribute":
                counter.steps += 1
            case "item":
                table["steps"] += 1
            case "tensor":
                total.add_(1)
        return self.net(x)


@pytest.mark.parametrize("what", ["attribute", "item", "tensor"])
@pytest.mark.parametrize("micro_batch", [5, None])
def test_a_forward_that_changes_an_object_that_it_is_given_is_refused_or_runs_whole(
    what: str, micro_batch: int | None
) -> None:
    model, counter, table, total = Counts(what), Counter(), {"steps": 0}, torch.zeros(())
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=micro_batch or "auto")
    if micro_batch and what != "item":
        with pytest.raises(memfit.Refused, match="changes an object that it is given"):
            model(X, counter, table, total)
    else:
        F.cross_entropy(model(X, counter, table, total), Y).backward()
    found = {"attribute": counter.steps, "item": table["steps"], "tensor": total.item()}
    assert found == {**dict.fromkeys(found, 0), what: int(micro_batch is None or what == "item")}  # planning leaves no trace


class Cached:
    def __init__(self) -> None:
        self._scale: float | None = None

    @functools.cached_property
    def shift(self) -> float:
        return 0.5


class UsesCache(nn.Linear):
    def forward(self, batch: dict[str, Any], cached: Cached, owner: Any) -> Tensor:  # type: ignore[override]
        batch["x"] = batch["x"] * 2
        cached._scale = 2.0
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(batch["x"] * cached._scale + cached.shift)


def test_what_an_argument_keeps_for_itself_and_the_models_own_state_are_no_changes() -> None:
    found = []
    for cut in (False, True):
        torch.manual_seed(0)
        model = UsesCache(7, 4).double()
        if cut:
            memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
        F.cross_entropy(model({"x": X, "name": "a"}, Cached(), SimpleNamespace(model=model)), Y).backward()
        found.append(gradients_of(model))
    assert relative_error(found[1], found[0]) <= 1e-12


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch loads its decompositions by it
def test_a_call_inside_forward_mode_differentiation_has_its_tangent() -> None:
    model = Net()
    wrapped(model, 5)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X))))
    assert out.tangent is not None


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.linear else out


def test_a_call_inside_a_function_mode_is_seen_by_it() -> None:
    found = []
    for wrap in (False, True):
        model = Net()
        if wrap:
            wrapped(model, 5)
        with Doubled():
            out = model(X)
        F.cross_entropy(out, Y).backward()
        found.append(gradients_of(model))
    assert relative_error(*found) <= 1e-12


class WritesInput(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.net = how, nn.Linear(7, 7).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "relu":
            return self.net(x.relu_())
        if self.how == "mask":
            x[x < 0.2] = -1.0
            return self.net(x)
        return self.net(x.sub_(0.5).div_(2).tanh())


@pytest.mark.parametrize("how", ["relu", "mask", "normalised"])
def test_what_a_forward_writes_into_its_input_is_there_after_the_call(how: str) -> None:
    found = []
    for wrap in (False, True):
        model, seen = WritesInput(how), []
        if wrap:
            wrapped(model, 5)
        for _ in range(3):
            x = X.clone()
            F.mse_loss(model(x), x).backward()
            seen.append(x)
        found.append({**gradients_of(model), "x": torch.stack(seen)})
    assert relative_error(found[1], found[0]) <= 1e-12


def test_backward_hooks_of_modules_are_told() -> None:
    model = Net()
    model.body[1].register_full_backward_hook(lambda *given: None)
    run = wrapped(model, 5)
    F.cross_entropy(model(X), Y).backward()
    assert any("backward hooks of modules" in event.message for event in run.events)



@pytest.mark.parametrize("accepted", [False, True])
def test_what_another_calls_forward_installs_is_there_for_a_call(accepted: bool) -> None:
    """Libraries that capture what layers return register hooks at the first forward."""
    model = Net()
    call, before = (CallAttributes([*model.modules()], ForwardReads()) for _ in range(2))
    model.body[1].register_forward_hook(lambda *given: None)
    model.scale = 2.0
    if accepted:
        call.accept(before.written())
    since = call.since(frozenset())
    with nullcontext() if since is None else since.undone():
        assert (len(model.body[1]._forward_hooks), model.scale) == ((1, 2.0) if accepted else (0, 1.0))
    assert (len(model.body[1]._forward_hooks), model.scale) == (1, 2.0)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("error", "failing"),
    [(OUT_OF_MEMORY, [2]), (OUT_OF_MEMORY, [3]), (OUT_OF_MEMORY, [2, 4]), (ValueError("not in pieces"), [2])],
    ids=["second", "third", "twice", "runs whole"],
)
def test_what_a_forward_writes_is_written_once_although_its_pass_fails(error: Exception, failing: list[int]) -> None:
    found = []
    for wrap in (False, True):
        model, ran = WritesInput("normalised"), [0]
        x = X.clone()
        if wrap:
            memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
            F.mse_loss(model(X.clone()), X).backward()
            model.zero_grad()

            def after(module: nn.Module, args: Any, out: Any, ran: list[int] = ran) -> None:
                ran[0] += not is_planning()
                if ran[0] in failing:
                    raise error

            model.net.register_forward_hook(after)
        F.mse_loss(model(x), x).backward()
        found.append({**gradients_of(model), "x": x})
    assert relative_error(found[1], found[0]) <= 1e-12
