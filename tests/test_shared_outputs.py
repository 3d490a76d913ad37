"""Outputs that all micro-batches have in common, which the proof's samples did not show to depend on their batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import gradients_of, relative_error

import memfit
from memfit.engine.batch_dependent import BatchDependent, check_same

EXACT = 1e-12


def batch(samples: int = 11) -> Tensor:
    """All but three samples have a negative first feature. (Proofs run on the first five.)"""
    torch.manual_seed(3)
    x = torch.randn(samples, 7).double()
    x[:, 0] = -x[:, 0].abs()
    x[[6, 8, 9], 0] *= -1
    return x


class Returning(nn.Module):
    """Returns logits, and what `statistic` makes of the batch and the logits."""

    def __init__(self, statistic: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.statistic = mlp(), statistic

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        logits = self.net(x)
        return logits, self.statistic(x, logits)


def share(x: Tensor, logits: Tensor) -> Tensor:
    return (x[:, 0] > 0).double().mean()


def used(x: Tensor, logits: Tensor) -> Tensor:
    """How many codes are used, as a codebook's perplexity."""
    mean = F.one_hot((x[:, 0] > 0).long(), 4).double().mean(0)
    return torch.exp(-(mean * (mean + 1e-10).log()).sum())


def balance(x: Tensor, logits: Tensor) -> Tensor:
    """A term of the loss that is 0 without any of the samples."""
    return (logits.square().sum(1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum().clamp(min=1)


def histogram(x: Tensor, logits: Tensor) -> Tensor:
    return torch.bincount((x[:, 0] > 0).long(), minlength=2) > 0


STATISTICS = {"a share": share, "a perplexity": used, "a term": balance, "entries": histogram}


def loss_of(output: tuple[Tensor, Any]) -> Tensor:
    logits, statistic = output
    return logits.square().mean() * (1 + statistic.double().sum())


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_statistic_that_few_samples_do_not_show_is_that_of_the_batch(statistic: str) -> None:
    x, model = batch(), Returning(STATISTICS[statistic])
    plain = copy.deepcopy(model)
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    for found, want in zip(trained(model, x), trained(plain, x), strict=True):
        assert abs(found - want) <= EXACT * abs(want)
    assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT
    assert any("is not the same in all of them" in event.message for event in run.events)


def test_its_value_is_read_before_the_loss() -> None:
    x, model = batch(), Returning(used)
    plain = copy.deepcopy(model)
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    assert model(x)[1].item() == plain(x)[1].item() > 1


def test_a_number_that_is_drawn_for_the_batch_is_one_number() -> None:
    x, model = batch(), Returning(lambda x, logits: torch.rand((), dtype=torch.float64))
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    logits, drawn = model(x)
    assert torch.allclose(logits * drawn, model.net(x) * drawn.item())
    assert any("is not the same in all of them" in event.message for event in run.events)


NUMBERS = [(0, 0.5, True), (1, 1.0, False), (0, False, False), (2, 3, True), (None, 1.0, False)]


@pytest.mark.parametrize(("first", "other", "differ"), NUMBERS)
def test_numbers_of_several_types_are_compared(first: Any, other: Any, differ: bool) -> None:
    for pair in ((first, other), (other, first)):
        with pytest.raises(BatchDependent) if differ else nullcontext():
            check_same(*pair, lambda: "a number")


class OfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.net(x), self.net[0].weight, torch.full((3,), torch.nan)


def test_what_is_the_same_in_all_micro_batches_costs_no_cut() -> None:
    model = OfParameters()
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    logits, weight, _ = model(batch())
    (logits.square().mean() + weight.square().mean()).backward()
    assert run.plan is not None and run.plan.micro_batch == 4
    assert not any("pieces" in event.message for event in run.events)
