"""Predictions and metrics that a script computes before its loss: looked at later, they cost no second forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, assert_transparent, gradients_of, mlp, plain_gradients, points, relative_error, wrapped
from torch import Tensor, nn

Metric = Callable[[Tensor, Tensor], Tensor]

METRICS: dict[str, Metric] = {
    "detached": lambda out, y: out.detach(),
    "its data": lambda out, y: out.data,
    "predictions": lambda out, y: out.argmax(1),
    "right ones": lambda out, y: (out.argmax(1) == y).sum(),
    "accuracy": lambda out, y: (out.argmax(dim=-1) == y).float().mean(),
    "mean confidence": lambda out, y: out.detach().softmax(1).amax(1).mean(),
    "predictions of max": lambda out, y: out.max(1, keepdim=True)[1],
    "by both": lambda out, y: (torch.min(out, dim=-1).indices == out.data.max(1).indices).sum(),
    "added up": lambda out, y: torch.tensor(3) + (out > 0).sum(),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_before_the_loss_is_free(name: str) -> None:
    model, (x, y) = mlp(), points()
    want = METRICS[name](mlp()(x), y)
    gradients = plain_gradients(mlp(), lambda m, x, y: F.cross_entropy(m(x), y).backward(), x, y)
    wrapped(model, 5)
    for _ in range(2):
        model.zero_grad()
        seen = Forwards(model[0])
        out = model(x)
        metric = METRICS[name](out, y)
        F.cross_entropy(out, y).backward()
        assert not metric.requires_grad and torch.allclose(metric, want)
        assert relative_error(gradients_of(model), gradients) <= 1e-12
    assert seen.sizes == [4, 4, 4]


def test_read_before_the_loss_it_has_its_value() -> None:
    model, (x, y) = mlp(), points()
    want = int((mlp()(x).argmax(1) == y).sum())
    wrapped(model, 5)
    out = model(x)
    assert int((out.argmax(1) == y).sum()) == want
    F.cross_entropy(out, y).backward()
    gradients = plain_gradients(mlp(), lambda m, x, y: F.cross_entropy(m(x), y).backward(), x, y)
    assert relative_error(gradients_of(model), gradients) <= 1e-12


def test_counted_over_many_steps() -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    right, each = torch.zeros((), dtype=torch.long), int((mlp()(x).argmax(1) == y).sum())
    for _ in range(4):
        seen = Forwards(model[0])
        out = model(x)
        right += (out.argmax(1) == y).sum()
        F.cross_entropy(out, y).backward()
    assert int(right) == 4 * each
    for _ in range(4):
        seen = Forwards(model[0])
        out = model(x)
        right = right + (out.argmax(1) == y).sum()
        F.cross_entropy(out, y).backward()
        assert seen.sizes == [4, 4, 4]
    assert int(right) == 8 * each


def test_what_is_kept_lets_go_of_its_batch() -> None:
    model, (_, y) = mlp(), points()
    wrapped(model, 5)
    kept = []

    def step() -> weakref.ref[Tensor]:
        x = points()[0]
        out = model(x)
        kept.append(out.detach())
        kept.append((out.argmax(1) == y).sum())
        F.cross_entropy(out, y).backward()
        return weakref.ref(x)

    references = [step() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert all(torch.isfinite(each.double()).all() for each in kept)


SCRIPTS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "stopped gradient": lambda m, x, y: F.mse_loss(out := m(x), out.detach() * 0.5).backward(),
    "own labels": lambda m, x, y: F.cross_entropy(out := m(x), out.detach().argmax(1)).backward(),
    "own weights": lambda m, x, y: (
        F.cross_entropy(out := m(x), y, reduction="none") * (1 - out.detach().softmax(1).amax(1))
    ).mean().backward(),
    "where it is positive": lambda m, x, y: torch.where((out := m(x)) > 0, out, 0.1 * out).sum().backward(),
    "a prediction as a mask": lambda m, x, y: ((out := m(x)).square().sum(1) * (out.argmax(1) == y)).mean().backward(),
    "a loss without a graph": lambda m, x, y: (F.cross_entropy(out := m(x), y) + out.square().mean() + sizes(out)).backward(),
    "without a graph": lambda m, x, y: without_a_graph(m(x), y).backward(),
    "written to": lambda m, x, y: written_to(m(x), y).backward(),
    "made to require": lambda m, x, y: made_to_require(m(x), y),
}


def sizes(out: Tensor) -> Tensor:
    with torch.no_grad():
        return out.exp().mean()


def without_a_graph(out: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = out.square().sum(1)
    return (F.cross_entropy(out, y, reduction="none") * scale).mean()


def written_to(out: Tensor, y: Tensor) -> Tensor:
    target = out.detach().clone()
    target[:, 0] = 2.0
    return F.mse_loss(out, target)


def made_to_require(out: Tensor, y: Tensor) -> None:
    mine = out.detach().requires_grad_()
    F.cross_entropy(mine, y).backward()
    out.backward(mine.grad)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loss_with_what_has_no_graph(name: str) -> None:
    assert_transparent(mlp(), SCRIPTS[name], *points())


class Doubled(torch.autograd.Function):
    """With a backward of its own, ten times what it does."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return (out * 2).clamp(min=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 10 * gradient


AFTER: list[Callable[[Tensor], Tensor]] = [lambda o: o.square().mean(), lambda o: F.mse_loss(o, o.detach() * 0.5), torch.std]


@pytest.mark.parametrize("further", AFTER)
def test_functions_with_a_backward_of_their_own_keep_it(further: Callable[[Tensor], Tensor]) -> None:
    assert_transparent(mlp(), lambda m, x, y: further(Doubled.apply(m(x))).backward(), *points())


def test_reentrant_checkpointing_of_the_loss() -> None:
    from torch.utils.checkpoint import checkpoint

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        def loss(out: Tensor) -> Tensor:
            return (out.tanh() * 3).square().mean()

        checkpoint(loss, model(x), use_reentrant=True).backward()  # type: ignore[union-attr]

    assert_transparent(mlp(), script, *points())


@pytest.mark.parametrize("name", ["max", "min"])
def test_the_largest_of_each_sample_in_a_loss_is_free(name: str) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        values, where = getattr(model(x), name)(1)
        assert where.shape == y.shape
        ((values - 1.0) ** 2).mean().backward()

    model, (x, y) = mlp(), points()
    assert_transparent(model, script, x, y, micro_batch=5)
    wrapped(model, 5)
    script(model, x, y)  # (the first time it is planned)
    seen = Forwards(model[0])
    script(model, x, y)
    assert seen.sizes == [4, 4, 4]
