"""What a first forward installs is there once, as in plain PyTorch; what planning changes in arguments is put back."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Notes
from torch import Tensor, nn
from torch.optim import SGD

import memfit

KINDS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


class Installs(nn.Module):
    """Its first forward registers a hook."""

    def __init__(self, kind: str, held: bool) -> None:
        super().__init__()
        self.first, self.second, self.kind, self.held = nn.Linear(6, 4), nn.Linear(4, 3), kind, held
        self.handles: list[Any] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if not (self.handles if self.held else getattr(self, "installed", False)):
            self.install()
        return self.second(torch.tanh(self.first(x)))

    def install(self) -> None:
        if self.kind == "register_forward_hook":
            handle = self.first.register_forward_hook(lambda module, args, out: out * 2)
        elif self.kind == "register_forward_pre_hook":
            handle = self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        else:
            handle = self.second.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
        if self.held:
            self.handles.append(handle)
        else:
            self.installed = True


def trained(kind: str, held: bool, how: str) -> list[float]:
    torch.manual_seed(0)
    model = Installs(kind, held)
    optimizer = SGD(model.parameters(), 0.1)
    run: Any = None
    if how == "step":
        run = memfit.wrap(model, optimizer, loss_fn=lambda m, x: loss_of(m, x), micro_batch=3)
    elif how == "checkpointed":
        block = nn.Sequential(model)
        run = memfit.wrap(block, optimizer, loss_fn=lambda m, x: loss_of(m, x), micro_batch=3, checkpoint=["0"])
    elif how != "plain":
        memfit.wrap(model, optimizer, micro_batch=3)
    if how == "evaluated":
        with torch.no_grad():
            model.eval()(torch.randn(8, 6, generator=torch.Generator().manual_seed(9)).double())
            model.train()
    found = []
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
        if run is not None:
            found.append(run.step(x).item())
            continue
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    hooks = (model.first._forward_hooks, model.first._forward_pre_hooks, model.second._backward_hooks)
    return [*found, *map(len, hooks), len(model.handles)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(8) % 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("how", ["script", "step"])
def test_hooks_of_a_first_forward_are_there_once(kind: str, held: bool, how: str) -> None:
    assert trained(kind, held, how) == pytest.approx(trained(kind, held, "plain"), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_hooks_are_there_once_if_the_loss_leaves_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def through_numpy(model: nn.Module, x: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long), reduction="none")
        return (losses * torch.from_numpy(np.cos(x.sum(1).numpy()))).mean()

    monkeypatch.setitem(globals(), "loss_of", through_numpy)
    assert trained(kind, True, "checkpointed") == pytest.approx(trained(kind, True, "plain"), rel=1e-12)


def test_memory_that_runs_out_while_looking_for_hooks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Notes([1])

    def runs_out(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        if left and type(out) is Tensor:
            left.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        scale = torch.from_numpy(np.cos(out.detach().numpy()[:, :1]))  # fails on fake tensors
        return (scale * out).square().mean()

    plain = Installs(KINDS[0], True)
    run = memfit.wrap(plain, SGD(plain.parameters(), 0.1), loss_fn=runs_out, micro_batch=3)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
    assert run.step(x).isfinite()
    assert not left


def test_hooks_that_an_evaluation_installs_are_there_once() -> None:
    plain = trained(KINDS[1], False, "plain")
    assert trained(KINDS[1], False, "evaluated") == pytest.approx(plain, rel=1e-12)


class Features(nn.Module):
    """Its first forward registers a hook and makes what the hook fills at every forward."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(6, 4), nn.Linear(4, 3), kind
        self.ready = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready, self.found = True, self.kind()
            self.first.register_forward_hook(self.fill)
        out = self.second(torch.tanh(self.first(x)))
        return out + (self.found[0] if self.kind is dict else self.found.pop()).mean(1, keepdim=True)

    def fill(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if isinstance(self.found, dict):
            self.found[0] = out
        else:
            self.found.append(out)


@pytest.mark.parametrize("kind", [dict, list])
def test_what_a_hook_of_the_first_forward_fills_is_there(kind: type) -> None:
    losses = []
    for line in (False, True):
        torch.manual_seed(0)
        model = Features(kind)
        optimizer = SGD(model.parameters(), 0.1)
        if line:
            memfit.wrap(model, optimizer, micro_batch=3)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-12)


class Recurrent(nn.Module):
    """Its first forward registers a hook beside a recurrent layer, which keeps a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.second, self.ready = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 3), False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            self.second.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
        return self.second(self.recurrent(x[:, None])[0][:, -1])


def test_a_list_of_parameters_that_a_layer_keeps_stays() -> None:
    losses = []
    for line in (False, True):
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = SGD(model.parameters(), 0.1)
        if line:
            memfit.wrap(model, optimizer, micro_batch=3)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
            with torch.no_grad():
                model.eval()(x)
            loss = loss_of(model.train(), x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-12)


class Adds(nn.Module):
    """A tensor that its first forward makes tells that a hook is there."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.net, self.added, self.buffer = nn.Linear(6, 3).double(), None, buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer and not hasattr(self, "shift"):
            self.register_buffer("shift", torch.ones(3).double())
            self.net.register_forward_hook(lambda module, args, out: out + self.shift)
        elif not self.buffer and self.added is None:
            self.added = torch.ones(3).double()
            self.net.register_forward_hook(lambda module, args, out: out + self.added)
        return self.net(x)


@pytest.mark.parametrize("buffer", [False, True])
def test_a_hook_that_comes_with_a_tensor_is_refused_or_runs_whole(buffer: bool) -> None:
    x, plain = torch.randn(8, 6).double(), Adds(buffer)
    whole, cut = copy.deepcopy(plain), copy.deepcopy(plain)
    memfit.wrap(cut, SGD(cut.parameters(), 0.1), micro_batch=3)
    with pytest.raises(memfit.Refused, match="registers hooks and makes"):
        cut(x)
    assert not cut.net._forward_hooks
    memfit.wrap(whole, SGD(whole.parameters(), 0.1), budget="8GiB")
    for _ in range(3):
        assert torch.equal(whole(x), plain(x))


class ComputesAWeightOnce(nn.Module):
    """It is reset after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.raw, self.weight, self.weights = nn.Parameter(torch.randn(3, 6).double()), None, dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = torch.tanh(self.raw)
        return x @ self.weight.T


class KeepsAWeightInADictionary(ComputesAWeightOnce):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights.setdefault("it", torch.tanh(self.raw)).T


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 3).double())


@pytest.mark.parametrize("make", [ComputesAWeightOnce, KeepsAWeightInADictionary, parametrized])
@pytest.mark.parametrize("how", [{"micro_batch": 3}, {"budget": "8GiB"}])
def test_a_weight_that_is_computed_once_per_step_is_refused_or_runs_whole(make: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, found = make(), []
    plain = copy.deepcopy(model)
    for each in (plain, model):
        optimizer = SGD(each.parameters(), 0.1)
        if each is model:
            memfit.wrap(each, optimizer, **how)
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
            if each is model and "micro_batch" in how:
                with nn.utils.parametrize.cached(), pytest.raises(memfit.Refused, match="go on with the graph"):
                    loss_of(each, x)
                return
            with nn.utils.parametrize.cached():
                loss = loss_of(each, x)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            found.append(loss.item())
            if isinstance(each, ComputesAWeightOnce):
                each.weight = None
                each.weights.clear()
    assert found[3:] == found[:3]


class Always(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        self.net.register_forward_hook(lambda module, args, out: out * 1.1)
        return self.net(x)


def test_hooks_of_every_forward_are_refused() -> None:
    model = Always()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    with pytest.raises(memfit.Refused, match="registers hooks at every call"):
        model(torch.randn(8, 6).double())
    assert not model.net._forward_hooks


class Cache:
    def __init__(self) -> None:
        self.position, self.seen = 0, [0]


class Decodes(nn.Module):
    """Its forward changes objects that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3).double()

    def forward(self, x: Tensor, cache: Cache | None = None, draws: random.Random | None = None) -> Tensor:
        out = self.net(x).mean(1)
        if cache is not None:
            out = out + cache.position
            cache.position += x.shape[1]
            cache.seen.append(x.shape[0])
        return out if draws is None else out * draws.random()


def evaluated(line: bool) -> list[Any]:
    torch.manual_seed(0)
    model, draws, found = Decodes(), random.Random(3), list[Any]()
    optimizer = SGD(model.parameters(), 0.1)
    if line:
        memfit.wrap(model, optimizer, micro_batch=3)
    x = torch.randn(8, 5, 2, generator=torch.Generator().manual_seed(1)).double()
    F.cross_entropy(model(x), torch.arange(8) % 3).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        cache = Cache()
        for i in range(3):
            found.append(model(x[:, i : i + 1], cache).sum().item())
        found += [cache.position, *cache.seen, model(x, None, draws).sum().item(), draws.random()]
    return found


def test_objects_that_an_evaluation_is_given_change_once() -> None:
    assert evaluated(True) == pytest.approx(evaluated(False), rel=1e-12)


@pytest.mark.parametrize("make", [Always, lambda: Adds(False), ComputesAWeightOnce])
def test_what_cannot_be_installed_once_runs_whole_in_step_mode_or_is_refused(make: Any) -> None:
    torch.manual_seed(0)
    model, found = make(), list[float]()
    plain = copy.deepcopy(model)
    cut = copy.deepcopy(model)
    with pytest.raises(memfit.Refused, match=r"first forward|every call"):
        memfit.wrap(cut, SGD(cut.parameters(), 0.1), loss_fn=loss_of, micro_batch=3).step(torch.randn(8, 6).double())
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), loss_fn=loss_of, budget="8GiB")
    optimizer = SGD(plain.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
        found.append(run.step(x).item())
        optimizer.zero_grad()
        loss = loss_of(plain, x)
        loss.backward()
        optimizer.step()
        assert found[-1] == pytest.approx(loss.item(), rel=1e-12)
        for each in (plain, model):
            if isinstance(each, ComputesAWeightOnce):
                each.weight = None
