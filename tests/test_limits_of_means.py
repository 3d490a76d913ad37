"""Limits of what samples add up to, inside a model with its own loss: the samples of a proof are on one side, micro-batches of
a later batch may not be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import MemfitError

EXACT = 1e-12
Term = Callable[[Tensor, float], Tensor]


def flooding(h: Tensor, at: float) -> Tensor:
    return (h.square().mean() - at).abs()


def free_bits(h: Tensor, at: float) -> Tensor:
    return torch.clamp(h.square().mean(), min=at)


def free_bits_by_dimension(h: Tensor, at: float) -> Tensor:
    return h.square().mean(0).clamp(min=at).sum()


def hinge(h: Tensor, at: float) -> Tensor:
    return F.relu(h.square().mean() - at)


def matching(h: Tensor, at: float) -> Tensor:
    return F.l1_loss(h.square().mean(0), torch.full_like(h[0], at))


def larger(h: Tensor, at: float) -> Tensor:
    return torch.maximum(h.square().mean(), torch.tensor(at).double())


def chosen(h: Tensor, at: float) -> Tensor:
    mean = h.square().mean()
    return torch.where(mean > at, mean, at)


def of_a_sum(h: Tensor, at: float) -> Tensor:
    squares = h.sum(1).square()
    return torch.clamp(h.square().sum(), min=50 * at) - squares.mean() + squares.sum()


TERMS: dict[str, Term] = {
    each.__name__: each for each in (flooding, free_bits, free_bits_by_dimension, hinge, matching, larger, chosen, of_a_sum)
}


class OwnLoss(nn.Module):
    def __init__(self, term: Term, at: float) -> None:
        super().__init__()
        self.net, self.term, self.at = mlp(), term, at

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return h.sum(1).square().mean() + self.term(h, self.at)


def batches() -> list[Tensor]:
    """Batches of which some samples are larger than the first ones, or all are."""
    torch.manual_seed(5)
    found = [torch.randn(12, 7).double() for _ in range(4)]
    found[0] *= 0.6
    found[1][8:] *= 6
    found[2] *= 4
    return found


@pytest.mark.parametrize("at", [0.03, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("stepping", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_a_limit_is_that_of_the_batch_or_refused(name: str, stepping: bool, at: float) -> None:
    model = OwnLoss(TERMS[name], at)
    plain = copy.deepcopy(model)
    optimizer, other = (SGD(each.parameters(), 0.01) for each in (model, plain))
    loss_fn: Any = (lambda model, x: model(x)) if stepping else None
    run = memfit.wrap(model, optimizer, micro_batch=4, loss_fn=loss_fn)
    try:
        for x in batches():
            other.zero_grad()
            plain(x).backward()
            other.step()
            if stepping:
                run.step(x)
            else:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= EXACT
    except MemfitError as error:
        assert "mixes samples" in str(error) or "number of samples" in str(error)


def test_a_batch_across_a_limit_runs_whole() -> None:
    model = OwnLoss(free_bits, 0.2)
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    for x in batches()[:2]:
        model(x).backward()
    assert sum("clamp() limits what samples add up to" in event.message for event in run.events) == 1


class Counted(nn.Module):
    """A function of a mean of those targets that count, linear where it is large."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x)
        return F.elu(10 * F.cross_entropy(logits, y) - 8) + logits.square().mean()


def test_a_mean_of_few_targets_is_corrected_only_where_the_loss_is_linear_in_it() -> None:
    """A micro-batch with few targets has a small part of the mean, where the function bends."""
    model = Counted()
    plain = copy.deepcopy(model)
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    x, y = batches()[0], torch.arange(12) % 3
    for ignored in ([], [1, 2, 3]):
        y[ignored] = -100
        for each in (model, plain):
            each.zero_grad()
        plain(x, y).backward()
        try:
            model(x, y).backward()
        except MemfitError as error:
            assert ignored and "the loss" in str(error)
            return
        assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT


class Numbered(nn.Module):
    """What is not a mean over samples, and numbers of the samples that it does not use."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.net, self.returns = mlp(), returns

    def forward(self, x: Tensor, numbers: Tensor) -> Any:
        h = self.net(x)
        if self.returns == "loss":
            return h.square().mean().sqrt()
        mixed = (h - h.mean(0)) / h.std(0)
        return mixed if self.returns == "output" else {"mixed": mixed, "scale": h.std()}


@pytest.mark.parametrize("returns", ["loss", "output", "two"])
def test_what_a_forward_does_not_use_is_no_way_to_cut_it(returns: str) -> None:
    """Each micro-batch would run all samples."""
    model = Numbered(returns)
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    with pytest.raises(MemfitError, match="mixes samples"):
        model(batches()[0], torch.arange(12))
