"""Losses that decide by what the model computed: told by the functions they call, and run in two passes from the start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from zoo.plain import gradients_of, relative_error

import memfit
from memfit.training.decides import Decides

Loss = Callable[[nn.Module, Any], Tensor]


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def confident(model: nn.Module, batch: Any) -> Tensor:
    """FixMatch (arXiv 2001.07685): pseudo-labels count where the model is sure of them."""
    x, y = batch
    out = model(x)
    with torch.no_grad():
        likely = model(x * 0.9).softmax(1)
    mask = (likely.max(1).values > 0.8).double()
    unlabelled = F.cross_entropy(out, likely.argmax(1), reduction="none") * mask
    return F.cross_entropy(out, y) + unlabelled.sum() / mask.sum().clamp(min=1)


def hard(model: nn.Module, batch: Any) -> Tensor:
    losses = each(model, batch)
    return losses[losses > 1.2].sum() / max(1, int((losses > 1.2).sum()))


def hardest_by_index(model: nn.Module, batch: Any) -> Tensor:
    losses = each(model, batch)
    return losses[losses.detach().argsort()[:2]].mean()


def counted_in_python(model: nn.Module, batch: Any) -> Tensor:
    losses = each(model, batch)
    mask = losses.detach() > 1.2
    return (losses * mask).sum() / max(1, int(mask.sum()))


def weights_filled_in(model: nn.Module, batch: Any) -> Tensor:
    losses = each(model, batch)
    weights = torch.zeros(len(losses), dtype=torch.float64)
    weights[losses.detach() > 1.2] = 1.0
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def with_accuracy_read(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    assert (out.argmax(1) == batch[1]).double().mean().item() >= 0
    return -out.log_softmax(1).gather(1, batch[1][:, None]).mean()


def huber(model: nn.Module, batch: Any) -> Tensor:
    off = model(batch[0])[:, 0] - batch[1]
    return torch.where(off.abs() < 1, 0.5 * off.square(), off.abs() - 0.5).mean()


def with_accuracy(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    (out.argmax(1) == batch[1]).double().mean()
    return F.cross_entropy(out, batch[1])


DECIDING: dict[str, tuple[Loss, str]] = {
    "confident": (confident, "count"),
    "hard": (hard, "picks"),
    "counted in Python": (counted_in_python, "number"),
    "weights filled in": (weights_filled_in, "count"),
    "hardest by index": (hardest_by_index, "picks"),
    "largest": (lambda m, b: each(m, b).topk(2).values.mean(), "orders"),
    "limited": (lambda m, b: F.cross_entropy(m(b[0]), b[1]).clamp(max=1.1), "limits"),
    "hinge of a mean": (lambda m, b: F.relu(1.5 - F.cross_entropy(m(b[0]), b[1])), "limits"),
    "flooded": (lambda m, b: torch.maximum(F.cross_entropy(m(b[0]), b[1]), torch.tensor(0.5).double()), "limits"),
}
NOT_DECIDING: dict[str, Loss] = {
    "mean": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "accuracy beside it": with_accuracy,
    "accuracy read": with_accuracy_read,
    "huber": huber,
    "hinge per sample": lambda m, b: F.relu(1 - m(b[0])[:, 0]).mean(),
    "mask of the batch": lambda m, b: (each(m, b) * (b[1] != 1)).sum() / (b[1] != 1).sum().clamp(min=1),
    "picked by labels": lambda m, b: each(m, b)[b[1] != 1].mean(),
    "pseudo-labels": lambda m, b: F.cross_entropy(m(b[0]), m(b[0] * 0.9).argmax(1)),
    "likeliest class": lambda m, b: m(b[0]).max(1).values.mean(),
    "gathered": lambda m, b: -m(b[0]).log_softmax(1).gather(1, m(b[0]).argmax(1, keepdim=True)).mean(),
    "best two classes": lambda m, b: m(b[0]).topk(2, dim=1).values.mean(),
    "clamped before its logarithm": lambda m, b: m(b[0]).softmax(1).clamp(min=1e-6).log().mean(),
    "penalty": lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 1e-3 * sum(p.square().sum() for p in m.parameters()),
}


@pytest.mark.parametrize(("loss", "word"), DECIDING.values(), ids=DECIDING)
def test_a_decision_is_told(loss: Loss, word: str) -> None:
    model = mlp()
    with Decides(model) as decides:
        loss(model, points())
    assert decides.how is not None and word in decides.how
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("loss", NOT_DECIDING.values(), ids=NOT_DECIDING)
def test_what_stays_apart_is_no_decision(loss: Loss) -> None:
    model = mlp()
    with Decides(model) as decides:
        loss(model, points())
    assert decides.how is None


def test_decisions_inside_the_model_are_its_own() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = mlp(seed=1), mlp(seed=2)

        def forward(self, x: Tensor) -> Tensor:
            first = self.one(x)
            sure = first.max(1).values > 0
            out = first.clone()
            out[sure] = self.other(x[sure])
            return out

    model = Routed()
    with Decides(model) as decides:
        F.cross_entropy(model(points()[0]), points()[1])
    assert decides.how is None


@pytest.mark.parametrize("name", ["confident", "hard", "counted in Python", "weights filled in", "limited", "hinge of a mean"])
def test_gradients_are_exact_although_nothing_is_decided_at_first(name: str) -> None:
    """While the model is untrained, parts add up as they do for a plain mean; later they would not."""
    loss, model = DECIDING[name][0], mlp()
    x, y = points(240)
    x, y = x * 3, x[:, :4].argmax(1)
    optimizer, totals = torch.optim.SGD(model.parameters(), lr=0.5), []
    run = memfit.wrap(
        model,
        optimizer,
        DataLoader(TensorDataset(x, y), batch_size=12),
        loss_fn=loss,
        target_batch=12,
        micro_batch=3,
        before_step=lambda: totals.append(gradients_of(model)),
    )
    for batch in run.loader:
        twin = copy.deepcopy(model)
        twin.zero_grad()
        value = loss(twin, batch.collate())
        value.backward()
        assert float(run.step(batch)) == pytest.approx(value.item(), rel=1e-9, abs=1e-12)
        wanted = gradients_of(twin)
        if any(gradient is not None and gradient.any() for gradient in wanted.values()):
            assert relative_error(totals[-1], wanted) <= 1e-9
        else:
            assert not any(gradient is not None and gradient.any() for gradient in totals[-1].values())
    assert any("two passes" in event.message for event in run.events)
