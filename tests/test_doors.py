"""Tensors that leave a forward by other ways than its output: joined, and put where the script looks for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Aside,
    Forwards,
    assert_transparent,
    cut_gradients,
    gradients_of,
    mlp,
    plain_gradients,
    points,
    relative_error,
    wrapped,
)
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import SGD

import memfit

Script = Callable[[nn.Module, Tensor, Tensor], Any]


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


class Attribute(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.aux_loss = out.square().mean()
        return out


class Hidden(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.net(x)
        return self.hidden.tanh()


class Growing(Wrapper):
    """A list that every forward appends to, and the script clears."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.losses.append(out.square().mean())
        self.losses.append(self.net[0](x).mean(1))
        return out


class Renewed(Wrapper):
    """A list that is made anew by every forward, and a tuple."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = [self.net[0](x)]
        self.features.append(self.features[0].tanh())
        self.pair = (self.features[0].exp(), x.sum(1))
        return self.net(x)


class Filled(Wrapper):
    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Any] = {"kept": 1}

    def forward(self, x: Tensor) -> Tensor:
        self.features["hidden"] = self.net[0](x)
        return self.net(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Attribute()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.router(x)}


def with_growing(model: Any, x: Tensor, y: Tensor) -> None:
    model.losses.clear()
    out = model(x)
    (F.cross_entropy(out, y) + 0.1 * model.losses[0] + model.losses[1].square().mean()).backward()


def with_renewed(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)
    first, second = model.features
    (F.cross_entropy(out, y) + F.mse_loss(first, second.detach()) + model.pair[0].mean()).backward()


def with_filled(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward(retain_graph=True)
    model.features["hidden"].pow(2).sum().backward()
    assert model.features["kept"] == 1 and len(model.features) == 2


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Script]] = {
    "an attribute": (Attribute, lambda m, x, y: (F.cross_entropy(m(x), y) + 0.1 * m.aux_loss).backward()),  # type: ignore[operator]
    "a list that grows": (Growing, with_growing),
    "a list and a tuple made anew": (Renewed, with_renewed),
    "a dict": (Filled, with_filled),
    "of a submodule": (Nested, lambda m, x, y: (F.cross_entropy(m(x)["logits"], y) - m.router.aux_loss).backward()),  # type: ignore[union-attr, operator]
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_left_on_modules_is_joined(name: str) -> None:
    build, script = SCRIPTS[name]
    assert_transparent(build(), script, *points())


def test_unused_or_detached_it_costs_nothing() -> None:
    model, (x, y) = Attribute(), points()
    want = plain_gradients(Attribute(), lambda m, x, y: F.cross_entropy(m(x), y).backward(), x, y)
    wrapped(model, 5)
    F.cross_entropy(model(x), y).backward()
    assert relative_error(gradients_of(model), want) <= 1e-12
    seen = Forwards(model.net[0])
    F.cross_entropy(model(x), y).backward()
    assert seen.sizes == [4, 4, 4]
    assert torch.allclose(model.aux_loss.detach(), model.net(x).square().mean())


def test_a_loss_and_what_is_beside_it_gather_together() -> None:
    model, (x, y) = Growing(), points()
    wrapped(model, 5)
    with_growing(model, x, y)
    seen = Forwards(model.net[3])
    with_growing(model, x, y)
    assert seen.sizes == [4, 4, 4]


def in_a_list(model: nn.Sequential) -> Callable[[], Any]:
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: kept.append(out))
    return kept.pop


def in_a_dict(model: nn.Sequential) -> Callable[[], Any]:
    kept: dict[str, Tensor] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            kept[name] = out

        return hook

    model[0].register_forward_hook(hook_for("hidden"))
    return lambda: kept["hidden"]


def in_an_object(model: nn.Sequential) -> Callable[[], Any]:
    class Extractor:
        features: Any = None

        def __init__(self, layer: nn.Module) -> None:
            layer.register_forward_hook(self.keep)

        def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.features = out

    extractor = Extractor(model[0])
    return lambda: extractor.features


def in_a_variable(model: nn.Sequential) -> Callable[[], Any]:
    kept: Any = None

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal kept
        kept = out

    model[0].register_forward_hook(hook)
    return lambda: kept


def in_a_global(model: nn.Sequential) -> Callable[[], Any]:
    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        global KEPT
        KEPT = out

    model[0].register_forward_hook(hook)
    return lambda: KEPT


KEPT: Any = None


@pytest.mark.parametrize("place", [in_a_list, in_a_dict, in_an_object, in_a_variable, in_a_global])
@pytest.mark.parametrize("passes", [1, 2])
def test_what_forward_hooks_keep_is_joined(place: Callable[[nn.Sequential], Callable[[], Any]], passes: int) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        hidden = kept[id(model)]()
        (loss + (hidden.square().mean() if passes == 1 else hidden.std())).backward()

    plain, model, (x, y) = mlp(), mlp(), points()
    kept = {id(m): place(m) for m in (plain, model)}  # type: ignore[arg-type]
    wrapped(model, 5)
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            script(each, x, y)
        want, found = gradients_of(plain), gradients_of(model)
        assert relative_error(found, want) <= 1e-12


def test_a_mixing_loss_beside_the_output_is_named() -> None:
    class Balanced(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            self.balance = out.softmax(1).mean(0).square().sum()
            return out

    def script(model: Any, x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(x), y) + model.balance).backward()

    model, (x, y) = Balanced(), points()
    wrapped(model, 5)
    with pytest.raises(memfit.Refused, match=r"(?s)balance mixes samples.*allow_inexact=\['balance'\]"):
        script(model, x, y)
    accepted = Balanced()
    run = wrapped(accepted, 5, allow_inexact=["balance"])
    script(accepted, x, y)
    want = plain_gradients(Balanced(), script, x, y)
    assert relative_error(gradients_of(accepted), want) <= 0.05
    assert [event.kind for event in run.events].count("not equal") == 1


def test_all_that_mix_are_named_at_once() -> None:
    class Two(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            self.balance = out.softmax(1).mean(0).square().sum()
            self.z_loss = out.logsumexp(0).square().sum()
            return out

    with pytest.raises(memfit.Refused, match=r"allow_inexact=\['(balance', 'z_loss|z_loss', 'balance)'\]"):
        cut_gradients(Two(), lambda m, x, y: F.cross_entropy(m(x), y).backward(), *points())


def test_a_forward_that_fails_leaves_the_places_as_they_were() -> None:
    class Failing(Attribute):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if fails.value and len(x) > 2:
                raise ValueError("no")
            return out

    fails = Aside(value=False)
    model, (x, y) = Failing(), points()
    wrapped(model, 5)
    F.cross_entropy(model(x), y).backward()
    before = model.aux_loss
    fails.value = True
    with pytest.raises(ValueError, match="no"):
        F.cross_entropy(model(x), y).backward()
    fails.value = False
    assert model.aux_loss is not before
    F.cross_entropy(model(x), y).backward()
    assert model.aux_loss.shape == ()


@pytest.mark.parametrize("watch", [lambda hidden: hidden.retain_grad(), lambda hidden: hidden.register_hook(lambda g: None)])
def test_the_gradient_of_what_a_forward_leaves_is_refused(watch: Callable[[Tensor], Any]) -> None:
    """The rest of the forward uses it, too, out of sight."""
    model, (x, y) = Hidden(), points()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    for _ in range(2):
        out = model(x)
        with pytest.raises(memfit.Refused, match="the rest of the forward"):
            watch(model.hidden)
        F.cross_entropy(out, y).backward()


def test_hooks_on_tensors_of_the_forward_are_told_of() -> None:
    model, (x, y) = Hidden(), points()
    model.net.register_forward_hook(lambda module, args, out: out.register_hook(lambda gradient: None) and None)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    F.cross_entropy(model(x), y).backward()
    assert any("those of one micro-batch" in event.message for event in run.events)


def test_copies_of_the_model_are_plain() -> None:
    model, (x, y) = Attribute(), points()
    wrapped(model, 5)
    F.cross_entropy(model(x), y).backward()
    model.aux_loss = model.aux_loss.detach()
    other = copy.deepcopy(model)
    other(x).sum().backward()
    assert type(other.aux_loss) is Tensor and other.aux_loss.grad_fn is not None


def test_it_runs_whole_as_it_was_written() -> None:
    got = cut_gradients(Attribute(), SCRIPTS["an attribute"][1], *points(), micro_batch=12)
    want = plain_gradients(Attribute(), SCRIPTS["an attribute"][1], *points())
    assert relative_error(got, want) <= 1e-12


def test_what_a_hook_computed_may_become_a_parameter() -> None:
    def trained(*, line: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).double()
        optimizer = SGD(model.parameters(), 0.1)
        if line:
            memfit.wrap(model, optimizer, micro_batch=3)
        for step in range(6):
            if step == 2:
                prune.l1_unstructured(model[1], "weight", amount=0.3)
            if step == 4:
                prune.remove(model[1], "weight")
            x, y = torch.randn(12, 6).double(), torch.randint(3, (12,))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for _, p in sorted(model.named_parameters())]

    for found, want in zip(trained(line=True), trained(line=False), strict=True):
        assert torch.allclose(found, want, rtol=1e-12, atol=1e-14)


class Masked(nn.Module):
    """Its forward puts a tensor over a parameter of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain = nn.Linear(7, 4), nn.Parameter(torch.ones(4, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.net.__dict__["weight"] = self.net._parameters["weight"] * self.gain
        return self.net(x)


def test_a_forward_may_put_a_tensor_over_its_parameter() -> None:
    x, y = points()
    model, plain = Masked(), Masked()
    plain.load_state_dict(model.state_dict())
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=5)
    for each in (model, plain):
        F.cross_entropy(each(x), y).backward()
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12


def test_tensors_that_the_graph_alone_keeps_are_not_looked_for_among_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*tensors: Tensor) -> None:
        raise AssertionError("looked at all objects of the process")

    monkeypatch.setattr("gc.get_referrers", forbidden)
    model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).double()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=3)
    x, y = points(8)
    F.cross_entropy(model(x), y).backward()
