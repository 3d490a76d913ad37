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
from memfit.equivalence.loss_branches import Decides, told_by

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


def weighed_by_sign(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss * torch.sign(loss.detach() - 1.2)


def first_by_weights(model: nn.Module, batch: Any) -> Tensor:
    losses = each(model, batch)
    weights = torch.zeros_like(losses, requires_grad=False)
    weights[:8] = 1
    return (losses * weights).sum() / weights.sum()


def sample_by_sample(model: nn.Module, batch: Any) -> Tensor:
    outs = model(batch[0])
    return sum((F.smooth_l1_loss(outs[i], batch[0][i, :4]) for i in range(len(outs))), torch.zeros(())) / len(outs)


def two_views(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    outs = model(torch.cat([x, 0.9 * x]))
    return (outs[: len(x)] - outs[len(x) :]).square().mean() + sum(part.square().mean() for part in outs.split(len(x)))


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
    "flooding": (lambda m, b: (F.cross_entropy(m(b[0]), b[1]) - 1.3).abs() + 1.3, "limits"),
    "weighed by a sign": (weighed_by_sign, "count"),
    "sign": (lambda m, b: F.cross_entropy(m(b[0]), b[1]) * torch.sign(F.cross_entropy(m(b[0]), b[1]) - 1.2), "limits"),
    "huber of a mean": (lambda m, b: F.smooth_l1_loss(m(b[0]).mean(), torch.tensor(-0.2).double(), beta=0.01), "limits"),
    "other huber of a mean": (lambda m, b: F.huber_loss(m(b[0]).mean(), torch.tensor(-0.2).double(), delta=0.01), "limits"),
    "distance of a mean": (lambda m, b: F.l1_loss(m(b[0]).mean(), torch.tensor(0.1).double()), "limits"),
    "means of classes": (lambda m, b: m(b[0]).mean(0).abs().sum(), "limits"),
    "norm of means": (lambda m, b: torch.linalg.vector_norm(m(b[0]).mean(0), 1), "limits"),
    "copied sign": (lambda m, b: torch.copysign(m(b[0]).mean(), torch.ones(()).double()), "limits"),
    "first samples": (lambda m, b: F.cross_entropy(m(b[0])[:8], b[1][:8]), "position"),
    "first samples of the batch": (lambda m, b: F.cross_entropy(m(b[0][:8]), b[1][:8]), "position"),
    "last samples": (lambda m, b: F.cross_entropy(m(b[0])[-8:, ...], b[1][-8:]), "position"),
    "every other sample": (lambda m, b: F.cross_entropy(m(b[0])[::2], b[1][::2]), "position"),
    "first piece": (lambda m, b: F.cross_entropy(m(b[0]).split(8)[0], b[1].split(8)[0]), "position"),
    "first by weights": (first_by_weights, "position"),
}
FAILING_ON_FEW: dict[str, Loss] = {
    "largest of more": lambda m, b: each(m, b).topk(7).values.mean(),
    "pairs": lambda m, b: m(b[0]).view(len(b[0]) // 2, 2, 4).max(1).values.mean(),
    "by position": lambda m, b: each(m, b)[torch.tensor([0, 3, 7])].mean(),
    "one sample": lambda m, b: each(m, b)[9],
    "narrowed": lambda m, b: m(b[0]).narrow(0, 2, 8).square().mean(),
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
    "other penalty": lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 1e-3 * sum(p.abs().sum() for p in m.parameters()),
    "limited scale": lambda m, b: F.cross_entropy(m(b[0]) * m[0].weight.norm().clamp(max=2), b[1]),
    "distance per sample": lambda m, b: (m(b[0]).mean(1) - b[0].mean(1)).abs().mean(),
    "known distances": lambda m, b: F.smooth_l1_loss(m(b[0]), b[0][:, :4]) + F.l1_loss(m(b[0])[..., -1], b[0][..., 0]),
    "one class": lambda m, b: m(b[0])[:, 0].square().mean(),
    "last class": lambda m, b: m(b[0])[..., -1].square().mean(),
    "all but the last class": lambda m, b: F.cross_entropy(m(b[0])[:, :-1], b[1].clamp(max=2)),
    "more classes than there are": lambda m, b: m(b[0])[:, None, :50].square().mean(),
    "every other class": lambda m, b: m(b[0])[:, ::2].square().mean() + m(b[0]).split(9, 1)[0].square().mean(),
    "all samples": lambda m, b: F.cross_entropy(m(b[0])[: len(b[0])], b[1][0:]),
    "sample by sample": sample_by_sample,
    "two views": two_views,
}


def told(model: nn.Module, loss: Loss) -> str | None:
    """What is told of a loss by looks at 5 samples and their parts."""
    looks = []
    for low, high in (0, 5), (0, 2), (2, 5):
        with Decides(model) as decides:
            loss(model, tuple(tensor[low:high] for tensor in points()))
        looks.append((high - low, decides))
    return looks[0][1].how or told_by(looks)


SWITCHING = (
    *("confident", "hard", "counted in Python", "weights filled in", "limited", "hinge of a mean"),
    *("flooding", "sign", "huber of a mean", "distance of a mean", "means of classes"),
)


@pytest.mark.parametrize(("loss", "word"), DECIDING.values(), ids=DECIDING)
def test_a_decision_is_told(loss: Loss, word: str) -> None:
    model = mlp()
    how = told(model, loss)
    assert how is not None and word in how
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("loss", NOT_DECIDING.values(), ids=NOT_DECIDING)
def test_what_stays_apart_is_no_decision(loss: Loss) -> None:
    assert told(mlp(), loss) is None


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


@pytest.mark.parametrize("name", [name for name, (_, word) in DECIDING.items() if word == "position"] + list(FAILING_ON_FEW))
def test_losses_of_some_of_the_samples_are_exact(name: str) -> None:
    """By their position in the batch; the few samples of a proof are all among them, or too few."""
    loss = FAILING_ON_FEW.get(name) or DECIDING[name][0]
    run, errors = errors_of(loss, learning_rate=0.0)
    assert max(errors) <= 1e-9
    assert any("two passes" in event.message for event in run.events)


@pytest.mark.parametrize("name", ["one class", "last class", "all but the last class", "known distances", "two views", "huber"])
def test_what_stays_apart_runs_once(name: str) -> None:
    run, errors = errors_of(NOT_DECIDING[name], learning_rate=0.0)
    assert max(errors) <= 1e-9
    assert not any("two passes" in event.message for event in run.events)


def test_what_fails_on_all_samples_fails_as_itself() -> None:
    with pytest.raises(RuntimeError, match="invalid for input") as caught:
        errors_of(lambda m, b: m(b[0]).view(7, 7).mean(), learning_rate=0.0)
    assert not getattr(caught.value, "__notes__", None)


def test_what_fails_on_few_samples_and_cannot_be_told_to_work_on_all_of_them_runs_on_all() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = each(model, batch)
        factor = float(losses.data_ptr() > 0)  # fake tensors lie nowhere
        if len(losses) < 7:
            raise LookupError("too few")
        return losses.mean() * factor

    run, errors = errors_of(loss, learning_rate=0.0)
    assert max(errors) <= 1e-9
    assert any("two passes" in event.message for event in run.events)


@pytest.mark.parametrize("name", SWITCHING)
def test_gradients_are_exact_although_nothing_is_decided_at_first(name: str) -> None:
    """While the model is untrained, parts add up as they do for a plain mean; later they would not."""
    run, errors = errors_of(DECIDING[name][0], learning_rate=0.5)
    assert max(errors, default=0.0) <= 1e-9
    assert any("two passes" in event.message for event in run.events)


def errors_of(loss: Loss, *, learning_rate: float) -> tuple[memfit.Run, list[float]]:
    """The run of an epoch of 20 steps, and by how much the gradients of each are off."""
    model, errors = mlp(), []
    x, y = points(240)
    x, y = x * 3, x[:, :4].argmax(1)
    optimizer, totals = torch.optim.SGD(model.parameters(), lr=learning_rate), []
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
        value = loss(twin, batch.uncollated.collate())
        value.backward()
        assert float(run.step(batch)) == pytest.approx(value.item(), rel=1e-9, abs=1e-12)
        wanted = gradients_of(twin)
        if any(gradient is not None and gradient.any() for gradient in wanted.values()):
            errors.append(relative_error(totals[-1], wanted))
        else:
            assert not any(gradient is not None and gradient.any() for gradient in totals[-1].values())
    return run, errors
