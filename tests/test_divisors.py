"""What a loss divides by weighs its parts: as long as it is in proportion to that, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from stepping import plain
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

import memfit
from memfit.engine.divisors import ADDS, OTHERWISE, SAME, divisors_of, how_divided

EXACT = 1e-12
X = torch.randn(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ALIKE = torch.tensor([[0, 1, 2], [2, 2, 3], [3, 1, 0], [2, 3, 3]] * 3)
"""In each sample as many entries other than one as other than zero."""
OTHER = torch.tensor([[1, 1, 0], [2, 2, 2], [0, 0, 0], [1, 1, 1], [1, 0, 2], [3, 3, 3]] * 2)
OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided": lambda each, mask: (each * mask).sum() / mask.sum().clamp(min=1),
    "divided by a number": lambda each, mask: (each * mask).sum() / max(1, int(mask.sum())),
    "divided in place": lambda each, mask: (each * mask).sum().div_(mask.sum()),
    "entries divided": lambda each, mask: (each * mask / mask.sum()).sum(),
    "multiplied": lambda each, mask: (1.0 / mask.sum().double()) * (each * mask).sum(),
    "smoothed": lambda each, mask: (each * mask).sum() / (mask.sum() + 1e-12),
    "picked": lambda each, mask: each[mask].mean(),
    "picked rows": lambda each, mask: each.sum(1)[mask[:, 0]].mean(),
    "beside another": lambda each, mask: (each * mask).sum() / mask.sum() + 0.1 * each.square().mean(),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("micro_batch", [2, 5])
def test_a_loss_may_count_what_is_nowhere_in_the_batch(name: str, micro_batch: int) -> None:
    """Its own mask may leave as many entries, on the first batches, as a leaf of the batch has labels."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return OWN[name]((model(x) - y).square(), y != 1)

    model = mlp(outputs=3)
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn=loss_fn, micro_batch=micro_batch)
    for y in (ALIKE, ALIKE.flip(1), OTHER, OTHER.flip(0), ALIKE):
        _, want = plain(model, loss_fn, (X, y))
        run.step((X, y))
        assert relative_error(gradients_of(model), want) <= EXACT


@pytest.mark.parametrize("name", ["divided", "multiplied", "picked"])
def test_a_loss_of_the_models_own_may_count_so(name: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(outputs=3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = self.body(x)
            return OWN[name]((out - y).square(), y != 1), out

    model = Own()
    wanted = []
    for y in (ALIKE, OTHER):
        model.zero_grad()
        model(X, y)[0].backward()
        wanted.append(gradients_of(model))
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.0), micro_batch=5)
    with pytest.raises(memfit.Refused, match="the loss"):
        for y, want in zip((ALIKE, OTHER), wanted):
            model.zero_grad()
            model(X, y)[0].backward()
            assert relative_error(gradients_of(model), want) <= EXACT


def test_what_a_known_mean_is_multiplied_by_is_looked_at() -> None:
    """All entries of the first batch count, so that it is the mean; later ones have gaps."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y.double()) * (y.numel() / (y != 1).sum())

    model = mlp(outputs=3)
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn=loss_fn, micro_batch=5)
    for y in (ALIKE.clamp(min=2), OTHER, OTHER.flip(0)):
        _, want = plain(model, loss_fn, (X, y))
        run.step((X, y))
        assert relative_error(gradients_of(model), want) <= EXACT


@pytest.mark.parametrize("weight", [None, lambda piece: (piece[1] != -100).sum()])
def test_a_micro_batch_without_labels_leaves_the_gradient_and_moves_state(weight: Any) -> None:
    class Centred(nn.Module):
        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.register_buffer("centre", torch.zeros(7, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return self.body(x)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none").sum() / (batch[1] != -100).sum()

    model, other = Centred(), Centred()
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn=loss_fn, micro_batch=4, weight=weight)
    x, y = points()
    for labels in (y, torch.where(torch.arange(12) < 8, y, -100), torch.where(torch.arange(12) > 3, y, -100)):
        run.step((x, labels))
        other.zero_grad()
        loss_fn(other, (x, labels)).backward()
        assert relative_error(gradients_of(model), gradients_of(other)) <= EXACT
        assert torch.allclose(model.centre, other.centre, rtol=EXACT)


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a constant": lambda out, y: F.cross_entropy(out, F.one_hot(y.clamp(min=0), 4).double()).add_(1.0),
    "a penalty": lambda out, y: F.cross_entropy(out, y).add_(0.1 * out.square().mean()),
    "a number": lambda out, y: F.cross_entropy(out, y).div_(4.0),
    "weighted": lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).double()).add_(1.0),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_known_mean_may_be_written_in_place(name: str) -> None:
    """First with labels everywhere, and then with gaps."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return IN_PLACE[name](model(batch[0]), batch[1])

    model, (x, y) = mlp(), points()
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn=loss_fn, micro_batch=4)
    for labels in (y, torch.where(torch.arange(12) % 5 > 1, y, -100), torch.where(torch.arange(12) > 5, y, -100)):
        loss, want = plain(model, loss_fn, (x, labels))
        assert float(run.step((x, labels))) == pytest.approx(loss, rel=EXACT)
        assert relative_error(gradients_of(model), want) <= EXACT


def test_divisors_are_read_off_the_graph() -> None:
    x, _ = points(4)
    out = mlp()(x)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    loss = (out.sum(1) * mask).sum() / mask.sum() - 0.5 * out.exp().mean() + 2.0 * out.square().mean(-1).sum()
    assert sorted(float(number) for number in divisors_of(loss) or ()) == [0.5, 2.0, 3.0, 4.0, 16.0]
    assert divisors_of(torch.stack([row.mean() for row in out.repeat(60, 1)]).mean()) is None  # too much to look at


def test_how_divisors_come_of_samples() -> None:
    assert how_divided([8.0, 2.0, 3.0], [[5.0, 2.0, 1.0], [3.0, 2.0, 9.0]]) == (ADDS, SAME, OTHERWISE)
    assert how_divided([5.0], [[5.0], [1.0]]) == (ADDS,)  # nothing in the second, and by one at least
    assert how_divided([5.0], [[5.0, 1.0], [1.0]]) is None
