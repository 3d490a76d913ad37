"""Parameters that a script uses around the model, over processes: the gradients that plain PyTorch gives for the mean of the
processes' losses, weighed by samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Failed, Processes
from torch import Tensor, nn
from torch.optim import SGD
from torch.overrides import TorchFunctionMode

import memfit

SHARES = (5, 3)
CLIP = 0.3
"""What gradients are clipped to: those of all processes."""


class Pairs(nn.Module):
    """Two towers; a scale that only the script uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.tower(x))

    def side(self, x: Tensor) -> Tensor:
        return self.tower(x).sin()


def built() -> Pairs:
    torch.manual_seed(5)
    return Pairs().double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return list(torch.randn(6, sum(SHARES), 6, generator=generator, dtype=torch.float64))


def scaled(model: Pairs, x: Tensor) -> Tensor:
    """All pairs of a process's own samples."""
    features = model(x)
    logits = model.scale.exp() * features @ features.t()
    return F.cross_entropy(logits, torch.arange(len(x)))


def tied(model: Pairs, x: Tensor) -> Tensor:
    """A weight that the forward uses and the script as well."""
    return (model(x) @ model.tower.weight).square().mean() + 0.1 * model.scale.square()


def beside(model: Pairs, x: Tensor) -> Tensor:
    """A method that is not listed, which runs whole."""
    return F.mse_loss(model(x), torch.ones(len(x), 4, dtype=x.dtype)) + model.side(x).square().mean()


def on_some(model: Pairs, x: Tensor) -> Tensor:
    """Only processes with more than three samples use the scale."""
    loss = (model(x).exp() @ model(x).t()).mean()
    return loss * model.scale if len(x) > 3 else loss


def around(model: Pairs, x: Tensor) -> Tensor:
    """The forward is never called, and there is no loader, so that nobody knows how many samples there are."""
    return model.side(x).square().mean() * model.scale


class Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_mode(model: Pairs, x: Tensor) -> Tensor:
    """A call that the script's mode looks into runs whole."""
    with Seen():
        return model(x).square().mean() + model.scale.square()


LOSSES: dict[str, Callable[[Pairs, Tensor], Tensor]] = {
    f.__name__: f for f in (scaled, tied, beside, on_some, around, in_mode)
}


def by_hand(loss: str) -> list[Tensor]:
    """One process: the mean of the losses of both parts, weighed by samples where these are known."""
    weights = [1 / 2, 1 / 2] if loss == "around" else [size / sum(SHARES) for size in SHARES]
    model = built()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    for x in batches():
        optimizer.zero_grad()
        sum(LOSSES[loss](model, part) * weight for part, weight in zip(x.split(list(SHARES)), weights)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def over_processes(loss: str, zeroes: bool) -> tuple[list[Tensor], bool, str]:
    """(parameters after the same steps with memfit, whether the unused one has no gradient, what was noted)."""
    model = built()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    run = memfit.wrap(model, optimizer, micro_batch=2)
    rank = torch.distributed.get_rank()
    for x in batches():
        optimizer.zero_grad(set_to_none=not zeroes)
        LOSSES[loss](model, x.split(list(SHARES))[rank]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    notes = " ".join(event.message for event in run.events)
    run.undo()
    return [p.detach() for p in model.parameters()], model.unused.grad is None, notes


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


@pytest.mark.parametrize("zeroes", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_they_are_the_mean_over_processes(loss: str, zeroes: bool, two: Processes) -> None:
    want = by_hand(loss)
    for rank, (found, unused, notes) in enumerate(two.run(over_processes, loss, zeroes)):
        for got, wanted in zip(found, want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
        assert unused
        how = "all alike" if loss == "around" else "weighted by samples"
        assert "outside the model's forward" in notes and f"averaged over processes, {how}" in notes, rank


def summed() -> None:
    model = built()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, micro_batch=2)
    x = batches()[0].split(list(SHARES))[torch.distributed.get_rank()]
    try:
        features = model(x)
        (F.mse_loss(features, torch.ones_like(features), reduction="sum") + model.scale * x.sum()).backward()
    finally:
        run.undo()


def test_beside_a_sum_they_are_refused(two: Processes) -> None:
    with pytest.raises(Failed, match=r"scale also received gradients outside the model's forward"):
        two.run(summed)


def summed_after_a_mean() -> None:
    model = built()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, micro_batch=2)
    first, second, third, *_ = (x.split(list(SHARES))[torch.distributed.get_rank()] for x in batches())
    try:
        for x in (first, second):
            optimizer.zero_grad()
            scaled(model, x).backward()
        optimizer.zero_grad()
        features = model(third)
        (F.mse_loss(features, torch.ones_like(features), reduction="sum") + model.scale * third.sum()).backward()
    finally:
        run.undo()


def test_those_known_from_means_are_refused_beside_a_sum_too(two: Processes) -> None:
    """In the third backward, in which nothing is looked for."""
    with pytest.raises(Failed, match=r"scale also received gradients outside the model's forward"):
        two.run(summed_after_a_mean)
