"""Losses that gather with the forwards that the script asked for, nothing twice, to the gradients of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, assert_transparent, gradients_of, mlp, plain_gradients, points, relative_error, wrapped
from torch import Tensor, nn
from torch.optim import SGD

import memfit
from memfit.capture.expression import SMALL

N = 12
Loss = Callable[[Tensor, Tensor], Tensor]
TARGET = torch.randn(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
ONE_OR_MINUS_ONE = torch.where(TARGET > 0, 1.0, -1.0).double()
MASK = TARGET > -0.5
WEIGHTS = torch.linspace(0.5, 2.0, N, dtype=torch.float64)


def kl_of_gaussians(out: Tensor) -> Tensor:
    mean, log_variance = out[:, :2], out[:, 2:]
    return -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


LOSSES: dict[str, Loss] = {
    "mean of squares": lambda out, y: ((out - TARGET) ** 2).mean(),
    "sum of squares": lambda out, y: (TARGET - out).pow(2).sum() / N,
    "masked mean": lambda out, y: ((out - TARGET).abs() * MASK).sum() / MASK.sum(),
    "where": lambda out, y: torch.where(MASK, out, TARGET).square().mean(),
    "kl of gaussians": lambda out, y: kl_of_gaussians(out),
    "own weights": lambda out, y: (F.cross_entropy(out, y, reduction="none") * WEIGHTS).sum() / WEIGHTS.sum(),
    "none, then mean": lambda out, y: F.mse_loss(out, TARGET, reduction="none").mean(1).mean(),
    "log-likelihood by gather": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(),
    "normalised": lambda out, y: (F.normalize(out, dim=1) * TARGET).sum(1).mean(),
    "cosine": lambda out, y: 1 - F.cosine_similarity(out, TARGET).mean(),
    "distance": lambda out, y: F.pairwise_distance(out, TARGET).mean(),
    "charbonnier": lambda out, y: torch.sqrt((out - TARGET) ** 2 + 1e-6).mean(),
    "dice of samples": lambda out, y: (1 - 2 * (out.sigmoid() * MASK).sum(1) / (out.sigmoid().sum(1) + MASK.sum(1))).mean(),
    "focal": lambda out, y: (
        (1 - out.softmax(1).gather(1, y[:, None])) ** 2 * F.cross_entropy(out, y, reduction="none")[:, None]
    ).mean(),
    "huber": lambda out, y: F.huber_loss(out, TARGET),
    "smooth l1": lambda out, y: F.smooth_l1_loss(TARGET, out, reduction="sum"),
    "kl, batchmean": lambda out, y: F.kl_div(out.log_softmax(1), TARGET.softmax(1), reduction="batchmean"),
    "kl, log target": lambda out, y: F.kl_div(out.log_softmax(1), TARGET.log_softmax(1), reduction="sum", log_target=True),
    "soft margin": lambda out, y: F.soft_margin_loss(out, ONE_OR_MINUS_ONE),
    "poisson": lambda out, y: F.poisson_nll_loss(out, TARGET.abs()),
    "gaussian": lambda out, y: F.gaussian_nll_loss(out[:, :2], TARGET[:, :2], out[:, 2:].exp()),
    "gaussian, fixed variance": lambda out, y: nn.GaussianNLLLoss()(out, TARGET, WEIGHTS[:, None].expand(N, 4)),
    "margin": lambda out, y: F.multi_margin_loss(out, y),
    "several labels": lambda out, y: F.multilabel_soft_margin_loss(out, MASK.double()),
    "triplet": lambda out, y: F.triplet_margin_loss(out[:, :2], out[:, 2:], TARGET[:, :2]),
    "cosine embedding": lambda out, y: F.cosine_embedding_loss(out, TARGET, ONE_OR_MINUS_ONE[:, 0]),
    "ranking": lambda out, y: F.margin_ranking_loss(out[:, 0], out[:, 1], ONE_OR_MINUS_ONE[:, 0], margin=0.1),
    "hinge": lambda out, y: nn.HingeEmbeddingLoss()(out.abs(), ONE_OR_MINUS_ONE),
    "squares of its own parts": lambda out, y: F.mse_loss(out[:, :2], out[:, 2:].tanh()),
}  # fmt: skip


def forwards_in_third_step(model: nn.Module, step: Callable[[], Any]) -> list[int]:
    """Sizes of forwards in the third step: by then memfit knows the script."""
    for _ in range(2):
        step()
    seen = Forwards(model[0])  # type: ignore[index]
    step()
    return seen.sizes


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_hand_runs_nothing_twice(name: str) -> None:
    loss, (x, y) = LOSSES[name], points()
    assert_transparent(mlp(), lambda model, x, y: loss(model(x), y).backward(), x, y)
    model = mlp()
    run = wrapped(model, 5)

    def step() -> None:
        model.zero_grad()
        loss(model(x), y).backward()

    assert forwards_in_third_step(model, step) == [4, 4, 4]
    assert relative_error(gradients_of(model), plain_gradients(mlp(), lambda m, x, y: loss(m(x), y).backward(), x, y)) <= 1e-12
    run.undo()


class Heads(nn.Sequential):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__(*mlp(outputs=8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = super().forward(x)
        return {"classes": out[:, :4], "values": out[:, 4:]}


SEVERAL: dict[str, Callable[[dict[str, Tensor], Tensor, nn.Module], Tensor]] = {
    "added": lambda out, y, m: F.cross_entropy(out["classes"], y) + F.mse_loss(out["values"], TARGET),
    "with factors": lambda out, y, m: 0.3 * F.cross_entropy(out["classes"], y) - F.l1_loss(out["values"], TARGET) / 4,
    "labels left out": lambda out, y, m: F.cross_entropy(out["classes"], y, ignore_index=1) + out["values"].square().mean(),
    "and a sum": lambda out, y, m: sum([F.mse_loss(out["values"], TARGET, reduction="sum"), kl_of_gaussians(out["classes"])]),  # type: ignore[arg-type, return-value]
    "and a regulariser": lambda out, y, m: F.cross_entropy(out["classes"], y)
    + 1e-2 * sum(p.abs().sum() for p in m.parameters())
    + F.mse_loss(out["values"], TARGET),
    "divided by a count": lambda out, y, m: F.cross_entropy(out["classes"], y)
    + ((out["values"] - TARGET).abs() * MASK).sum() / (MASK.sum() + 1),
    "backward of a multiple": lambda out, y, m: (F.cross_entropy(out["classes"], y) + F.mse_loss(out["values"], TARGET)) * 8,
    "by hand alone": lambda out, y, m: -(out["classes"].log_softmax(1)[:, 0].mean() - (out["values"] - TARGET).abs().mean()),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_losses_gather_together(name: str) -> None:
    loss, (x, y), model = SEVERAL[name], points(), Heads()
    want = plain_gradients(model, lambda m, x, y: loss(m(x), y, m).backward(), x, y)
    run = wrapped(model, 5)
    values = []

    def step() -> None:
        model.zero_grad()
        value = loss(model(x), y, model)
        value.backward()
        values.append(value.item())
        assert relative_error(gradients_of(model), want) <= 1e-12

    assert forwards_in_third_step(model, step) == [4, 4, 4]
    run.undo()
    assert values == pytest.approx([loss(model(x), y, model).item()] * 3, rel=1e-12)


def by_grad(loss: Tensor, parameters: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = gradient


CALLS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "triplet": lambda m, x, y: nn.TripletMarginLoss()(m(x), m(x.flip(0)), m(-x)),
    "siamese": lambda m, x, y: (F.pairwise_distance(m(x), m(-x)) * (y > 1)).mean(),
    "consistency": lambda m, x, y: F.cross_entropy(m(x), y) + 0.5 * F.mse_loss(m(x + 0.1), m(x - 0.1)),
    "one after the other": lambda m, x, y: F.cross_entropy(m(x), y) + F.mse_loss(m(-x), TARGET),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_one_loss_needs_run_together(name: str) -> None:
    loss, (x, y), model = CALLS[name], points(), mlp()
    want = plain_gradients(model, lambda m, x, y: loss(m, x, y).backward(), x, y)
    run = wrapped(model, 5)

    def step() -> None:
        model.zero_grad()
        loss(model, x, y).backward()
        assert relative_error(gradients_of(model), want) <= 1e-12

    assert sum(forwards_in_third_step(model, step)) == {"triplet": 3, "siamese": 2, "consistency": 3}.get(name, 2) * N
    run.undo()


def test_what_was_computed_for_several_calls_can_be_read_after() -> None:
    x, _ = points()
    model = mlp()
    wrapped(model, 5)
    first, second = model(x), model(-x)
    F.mse_loss(first, second).backward()
    with torch.no_grad():
        want = [copy.deepcopy(model)(x) for x in (x, -x)]
    assert torch.allclose(first.detach(), want[0]) and torch.equal(second.argmax(1), want[1].argmax(1))


def test_a_deferred_sum_may_be_used_in_any_way() -> None:
    """Looked at, compared, sent through autograd.grad and torch.autograd.backward, raised to a power, kept in a list."""
    x, y = points()
    uses: dict[str, Callable[[Tensor, nn.Module], Any]] = {
        "item": lambda loss, m: (loss.item(), loss.backward()),
        "compared": lambda loss, m: (bool(loss > 0), loss.backward()),
        "printed": lambda loss, m: (str(loss), f"{loss:.3f}", loss.backward()),
        "detached": lambda loss, m: (loss.detach().clone(), loss.backward()),
        "grad": lambda loss, m: by_grad(loss, list(m.parameters())),
        "autograd.backward": lambda loss, m: torch.autograd.backward([loss]),
        "squared": lambda loss, m: loss.square().backward(),
        "scaled by a tensor": lambda loss, m: (loss * torch.tensor(3.0)).backward(),
        "stacked": lambda loss, m: torch.stack([loss, loss * 2]).sum().backward(),
        "with a regulariser, from outside": lambda loss, m: torch.autograd.backward([loss + m[0].weight.sum()]),
    }  # fmt: skip
    for name, use in uses.items():
        model = Heads()

        def script(m: nn.Module, use: Callable[[Tensor, nn.Module], Any] = use) -> None:
            out = m(x)
            use(F.cross_entropy(out["classes"], y) + F.mse_loss(out["values"], TARGET), m)

        want = plain_gradients(model, script)
        wrapped(model, 5)
        for _ in range(3):
            model.zero_grad()
            script(model)
            assert relative_error(gradients_of(model), want) <= 1e-12, name


def test_the_plan_counts_what_several_losses_need() -> None:
    model, (x, y) = Heads(), points(64)
    target = torch.randn(64, 4, dtype=torch.float64)
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=8)
    for _ in range(3):
        model.zero_grad()
        out = model(x)
        (F.cross_entropy(out["classes"], y) + F.mse_loss(out["values"], target)).backward()
    assert run.plan is not None and run.plan.mode == "accumulate" and run.plan.accumulation == 8


@pytest.mark.parametrize("late", [True, False])
def test_tensors_of_the_batch_may_change_before_the_loss(late: bool) -> None:
    """The difference is computed from the values that it was written with."""
    model, (x, _) = mlp(), points()
    wrapped(model, 5)
    target = TARGET.clone()
    difference = model(x) - target
    if late:
        target.zero_()
        loss = difference.square().mean()
    else:
        loss = difference.square().mean()
        target.zero_()
    loss.backward()
    want = plain_gradients(mlp(), lambda m, x: (m(x) - TARGET).square().mean().backward(), x)
    assert relative_error(gradients_of(model), want) <= 1e-12


def test_a_large_tensor_of_the_batch_that_changes_before_the_loss_is_an_error() -> None:
    """It is not copied."""
    model, (x, _) = nn.Linear(7, SMALL).double(), points()
    wrapped(model, 5)
    target = torch.zeros(len(x), SMALL, dtype=torch.float64)
    difference = model(x) - target
    target.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        difference.square().mean()
