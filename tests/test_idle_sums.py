"""Terms of a loss that are 0 on the samples of a proof, and add up otherwise than the rest once they are not."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from processes import Processes
from stepping import Seen
from test_shared_outputs import batch
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import Gradients, gradients_of, relative_error

import memfit

EXACT = 1e-12
Term = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def few(x: Tensor) -> Tensor:
    """A mask that leaves none of the samples that a proof takes."""
    return (x[:, 0] > 0).double()


def margin(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square().sum(1) * few(x)).sum()


def masked_mean(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square().sum(1) * few(x)).sum() / few(x).sum().clamp(min=1)


def product(x: Tensor, logits: Tensor) -> Tensor:
    return few(x) @ logits.square().sum(1)


def in_pairs(x: Tensor, logits: Tensor) -> Tensor:
    each = logits.square().sum(1) * few(x)
    return (each[:, None] * each[None]).mean()


def of_few(x: Tensor, logits: Tensor) -> Tensor:
    return F.mse_loss(logits * few(x)[:, None], torch.zeros_like(logits), reduction="sum")


def of_a_mean(x: Tensor, logits: Tensor) -> Tensor:
    """A penalty on a mean over samples that none of few reaches."""
    return F.relu((logits.square() * few(x)[:, None]).mean(0) - 1e-3).sum()


def centred(x: Tensor, logits: Tensor) -> Tensor:
    kept = logits * few(x)[:, None]
    return (kept - kept.mean(0)).square().sum(1).mean()


def of_rows(x: Tensor, logits: Tensor) -> Tensor:
    kept = logits * few(x)[:, None]
    return (kept @ kept.T).amax(1).mean()


def after_many(x: Tensor, logits: Tensor) -> Tensor:
    """Sums by sample come before, and have more entries for more samples."""
    for _ in range(3):
        logits = logits + logits.sum(1, keepdim=True).tanh()
    return margin(x, logits)


def far_apart(x: Tensor, logits: Tensor) -> Tensor:
    """A margin between samples that none of few is within."""
    large = logits * (1 + 200 * few(x)[:, None])
    return F.relu(1e-3 * (large @ large.T).amax(1) - 1).mean()


def largest(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square() * few(x)[:, None]).max(0)[0].sum()


def many(x: Tensor, logits: Tensor) -> Tensor:
    kept = logits * few(x)[:, None]
    return (kept.repeat(1, 40).T @ kept).square().sum()


def in_order(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square().sum(1) * few(x)).cumsum(0).mean()


def by_sample(x: Tensor, logits: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for each, used in zip(logits, few(x)):
        total = total + F.relu(used * each.square().sum())
    return total


def twice_divided(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square().sum(1) * few(x)).mean() / len(x)


def by_counts(x: Tensor, logits: Tensor) -> Tensor:
    kept = logits * few(x)[:, None]
    return (kept.mean(0) / (logits.detach() > 0).sum(0).clamp(min=1)).sum()


def stacked(x: Tensor, logits: Tensor) -> Tensor:
    return torch.stack([used * each.square().sum() for each, used in zip(logits, few(x))]).sum()


SUMS = [margin, masked_mean, product, in_pairs, of_few, of_a_mean, centred, of_rows, after_many]
SUMS += [twice_divided, by_counts, far_apart, largest, many, in_order, by_sample, stacked]
TERMS: dict[str, Term] = {each.__name__: each for each in SUMS}


def loss_of(model: nn.Module, x: Tensor, term: Term) -> Tensor:
    logits = model(x)
    return (logits - 1).square().mean() + 0.1 * term(x, logits)


class OwnLoss(nn.Module):
    def __init__(self, term: Term) -> None:
        super().__init__()
        self.net, self.term = mlp(), term

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.net, x, self.term)


def stepped(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("name", TERMS)
def test_a_term_that_few_samples_do_not_show_is_that_of_the_batch_in_step_mode(name: str) -> None:
    x, term, model = batch(), TERMS[name], mlp()
    plain = copy.deepcopy(model)
    want = stepped(plain, SGD(plain.parameters(), 0.1), lambda: loss_of(plain, x, term))
    optimizer = SGD(model.parameters(), 0.1)
    run = memfit.wrap(model, optimizer, micro_batch=4, loss_fn=lambda model, x: loss_of(model, x, term))
    assert [run.step(x).item() for _ in range(3)] == pytest.approx(want, rel=EXACT)
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= EXACT


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_the_models_own_loss_is_that_of_the_batch(name: str) -> None:
    x, model = batch(), OwnLoss(TERMS[name])
    plain = copy.deepcopy(model)
    want = stepped(plain, SGD(plain.parameters(), 0.1), lambda: plain(x))
    optimizer = SGD(model.parameters(), 0.1)
    run = memfit.wrap(model, optimizer, micro_batch=4)
    assert stepped(model, optimizer, lambda: model(x)) == pytest.approx(want, rel=EXACT)
    assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT
    assert any("a batch runs whole" in event.message for event in run.events)


def mean(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square().sum(1) * few(x)).mean()


def mean_of_columns(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square() * few(x)[:, None]).mean(0)[:1].sum() * 0.5


def sum_by_samples(x: Tensor, logits: Tensor) -> Tensor:
    return 0.5 * margin(x, logits) / len(x)


def sum_by_entries(x: Tensor, logits: Tensor) -> Tensor:
    return (logits.square() * few(x)[:, None]).sum().div(logits.numel())


FITTING: dict[str, Term] = {each.__name__: each for each in (mean, mean_of_columns, sum_by_samples, sum_by_entries)}


@pytest.mark.parametrize("name", FITTING)
def test_a_mean_that_is_zero_costs_nothing(name: str) -> None:
    """A mean of all samples adds up with the rest of a loss by samples, whatever its values are."""
    x, model = batch(), OwnLoss(FITTING[name])
    plain = copy.deepcopy(model)
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    for samples in (x[:6], x):
        for each in (model, plain):
            each.zero_grad()
            each(samples).backward()
        assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT
    assert not any("whole" in event.message for event in run.events)


def test_a_sum_that_stays_zero_is_cut() -> None:
    x, model = batch()[:6], OwnLoss(margin)
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    stepped(model, SGD(model.parameters(), 0.0), lambda: model(x))
    assert run.plan is not None and run.plan.micro_batch == 4
    assert not any("whole" in event.message for event in run.events)


def on_one_of_two(name: str) -> Gradients:
    """The gradients of a second step in step mode, where only the first process meets the term."""
    model = mlp()
    seen = Seen(model)
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4, loss_fn=loss_fn_of(name), before_step=seen)
    for _ in range(2):
        run.step(shares()[int(os.environ["RANK"])])
    return seen.gradients[-1]


def shares() -> tuple[Tensor, Tensor]:
    x = batch()
    return x, torch.cat([-x[:, :1].abs(), x[:, 1:] + 0.1], 1)


def loss_fn_of(name: str) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: loss_of(model, x, (FITTING | TERMS)[name])


@pytest.mark.parametrize("name", [*FITTING, "of_a_mean", "centred", "far_apart", "largest", "in_order"])
def test_a_term_that_one_process_meets_weighs_as_under_ddp(name: str, two: Processes) -> None:
    model = mlp()
    for share in shares():
        (loss_fn_of(name)(model, share) / 2).backward()
    for found in two.run(on_one_of_two, name):
        assert relative_error(found, gradients_of(model)) <= EXACT
