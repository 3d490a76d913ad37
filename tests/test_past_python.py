"""What C++ computes from an output without saying so: scripted functions, functions of the script's own with a backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, wrapped
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

from memfit import Refused

X, Y = points(12)
Y = Y.clone()
Y[1:4] = -100
EXACT = 1e-12


@pytest.fixture(autouse=True)
def strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")


class Doubled(torch.autograd.Function):
    """Two times its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def _tripled(x: Tensor) -> Tensor:
    return x * 3.0


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    PAST: dict[str, Callable[[Tensor], Tensor]] = {"scripted": torch.jit.script(_tripled), "function": Doubled.apply}

Loss = Callable[[Tensor], Tensor]
Looked = list[Any]


def hooked(out: Tensor, loss: Loss) -> Looked:
    came: Looked = []
    out.register_hook(lambda gradient: came.append(gradient.clone()))
    out.register_hook(lambda gradient: gradient * 0.5)
    loss(out).backward()
    return came


def retained(out: Tensor, loss: Loss) -> Looked:
    out.retain_grad()
    loss(out).backward()
    assert out.retains_grad
    return [out.grad]


def cleared(out: Tensor, loss: Loss) -> Looked:
    out.retain_grad()
    loss(out).backward(retain_graph=True)
    out.grad = None
    loss(out).backward()
    return [out.grad]


def asked(out: Tensor, loss: Loss) -> Looked:
    out.retain_grad()
    return [*torch.autograd.grad(loss(out), out)]


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("look", [hooked, retained, cleared, asked])
@pytest.mark.parametrize("alone", [True, False])
def test_gradients_of_outputs_come_to_their_hooks(past: str, look: Callable[[Tensor, Loss], Looked], alone: bool) -> None:
    def loss(out: Tensor) -> Tensor:
        found = PAST[past](out).square().mean()
        return found if alone else found + out.exp().mean()

    model, plain = mlp(), mlp()
    wrapped(model, 5)
    found, want = look(model(X), loss), look(plain(X), loss)
    assert len(found) == len(want) and all(torch.allclose(a, b, rtol=EXACT, atol=0) for a, b in zip(found, want))
    assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT


class WithLoss(nn.Module):
    """Returns its loss, a mean over valid labels, and its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(x)
        return F.cross_entropy(scores, y), scores


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("beside", [None, "scores", "itself"])
def test_a_models_own_loss_is_weighted_there_too(past: str, beside: str | None) -> None:
    def gradients(model: WithLoss) -> Any:
        loss, scores = model(X, Y)
        total = PAST[past](loss)
        if beside is not None:
            total = total + (PAST[past](scores).square().mean() if beside == "scores" else loss)
        total.backward()
        return gradients_of(model), [total.detach()]

    model = WithLoss()
    wrapped(model, 5)
    (found, value), (want, wanted) = gradients(model), gradients(WithLoss())
    assert relative_error(found, want) <= EXACT and torch.allclose(value[0], wanted[0], rtol=EXACT, atol=0)


@pytest.mark.parametrize("look", ["retain_grad", "register_hook"])
def test_what_would_look_at_a_gradient_that_was_gathered_already_is_refused(look: str) -> None:
    model = mlp()
    wrapped(model, 5)
    out = model(X)
    loss = F.cross_entropy(out, Y)
    watch = out.retain_grad if look == "retain_grad" else lambda: out.register_hook(print)
    with pytest.raises(Refused, match=f"output.{look}"):
        watch()
    loss.backward()
    watch()  # nothing comes any more
    assert relative_error(gradients_of(model), gradients_of(_plain())) <= EXACT


def _plain() -> nn.Module:
    model = mlp()
    F.cross_entropy(model(X), Y).backward()
    return model
