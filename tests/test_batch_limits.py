"""Limits of what samples make together: the samples of a proof are on one side, micro-batches of a later batch may not be."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from stepping import Seen
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import MemfitError
from memfit.engine.batch_limits import Limits

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
    assert sum("a batch runs whole: the side of the limit of clamp()" in event.message for event in run.events) == 1


class OfFew(nn.Module):
    """A mean over those samples that are marked, by at least `least` of them, beside a mean over all."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.net, self.least = mlp(), least

    def forward(self, x: Tensor) -> Tensor:
        h, marked = self.net(x), (x[:, 0] > 0).double()
        return h.square().mean() + (marked * h.sum(1).square()).sum() / marked.sum().clamp(min=self.least)


@pytest.mark.parametrize("stepping", [False, True])
@pytest.mark.parametrize(("size", "least"), [(1, 1), (2, 1), (3, 2)])
def test_a_count_below_its_limit_is_that_of_the_batch_or_refused(size: int, least: int, stepping: bool) -> None:
    """Where micro-batches have as many samples as the limit, a count of fewer looks like one of all of them."""
    model = OfFew(least)
    plain = copy.deepcopy(model)
    loss_fn: Any = (lambda model, x: model(x)) if stepping else None
    optimizer, other = (SGD(each.parameters(), 0.01) for each in (model, plain))
    run = memfit.wrap(model, optimizer, micro_batch=size, loss_fn=loss_fn)
    torch.manual_seed(7)
    try:
        for unmarked in (0, 1, 3, 6):
            x = torch.randn(12, 7).double()
            x[:, 0] = x[:, 0].abs() + 0.1
            x[:unmarked, 0] *= -1
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
        assert any(said in str(error) for said in ("mixes samples", "number of samples", "is not made as it was"))


Statistic = Callable[[Tensor], Tensor]
STATISTICS: dict[str, Statistic] = {
    "largest": lambda h: h / h.abs().max().clamp(min=2.5),
    "largest by dimension": lambda h: h / h.abs().amax(0).clamp_min(2.5),
    "deviation": lambda h: h / h.std(0).clamp(min=2.0),
    "norm": lambda h: h * (12 / h.norm()).clamp(max=1),
    "mean": lambda h: h + F.relu(h.mean(0).abs() - 1),
    "detached": lambda h: h / torch.maximum(h.detach().abs().max(), torch.tensor(2.5).double()),
    "running count": lambda h: h * ((h.detach()[:, :1] > -9).long().cumsum(0) <= 6),
    "running sum": lambda h: h * (h.detach().abs().sum(1).cumsum(0) < 15)[:, None],
}


class Scaled(nn.Module):
    """A forward that scales by a statistic of the batch beyond a limit, before or after its layers."""

    def __init__(self, scaled: Statistic, before: bool) -> None:
        super().__init__()
        self.net, self.scaled, self.before = mlp(), scaled, before

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.net, x)

    def around(self, net: nn.Module, x: Tensor) -> Tensor:
        return net(self.scaled(x)) if self.before else self.scaled(net(x))


@pytest.mark.parametrize("mode", ["outputs", "own loss", "loss_fn"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", STATISTICS)
def test_a_limit_of_a_statistic_is_that_of_the_batch_or_refused(name: str, before: bool, mode: str) -> None:
    torch.manual_seed(6)
    model = Scaled(STATISTICS[name], before)
    plain = copy.deepcopy(model)
    whole = model if mode == "outputs" else WithLoss(model)
    optimizer, other = (SGD(each.parameters(), 0.01) for each in (model, plain))
    loss_fn = (lambda net, x: loss_of(model.around(net, x))) if mode == "loss_fn" else None
    run = memfit.wrap(model.net if loss_fn else whole, optimizer, micro_batch=4, loss_fn=loss_fn)
    try:
        for scale in (0.3, 0.3, 4.0, 4.0, 4.0):
            x = scale * torch.randn(12, 7).double()
            other.zero_grad()
            loss_of(plain(x)).backward()
            other.step()
            if loss_fn:
                run.step(x)
            else:
                optimizer.zero_grad()
                (whole(x) if mode == "own loss" else loss_of(whole(x))).backward()
                optimizer.step()
            assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= EXACT
    except MemfitError as error:
        assert mode != "loss_fn"
        assert any(said in str(error) for said in ("mixes samples", "number of samples", "is not the same in all of them"))


def test_a_limit_is_watched_in_batches_of_other_lengths() -> None:
    model = Scaled(STATISTICS["largest"], True)
    plain = copy.deepcopy(model)
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    torch.manual_seed(6)
    for scale, length in ((0.3, 5), (4.0, 3)):
        x = scale * torch.randn(12, length, 7).double()
        for each in (model, plain):
            each.zero_grad()
            loss_of(each(x)).backward()
        assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT


@pytest.mark.parametrize("name", ["largest", "detached"])
def test_a_limit_in_calls_that_share_a_loss_is_that_of_the_batch_or_refused(name: str) -> None:
    model = Scaled(STATISTICS[name], True)
    plain = copy.deepcopy(model)
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    torch.manual_seed(6)
    for scale in (0.3, 4.0):
        x = scale * torch.randn(12, 7).double()
        F.mse_loss(plain(x), plain(x + 0.1).detach()).backward()
        try:
            F.mse_loss(model(x), model(x + 0.1).detach()).backward()
        except MemfitError as error:
            assert scale > 1 and "is not the same in all of them" in str(error)
            return
        assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


class WithLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.net(x))


class PerSample(nn.Module):
    """Limits with an entry per sample or of parameters alone, and those of numbers that only are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.logged = mlp(), nn.Parameter(torch.tensor(3.0).double()), 0.0
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]).double())

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.net(x)) / x.abs().amax(1, keepdim=True).clamp(min=0.9)
        self.last = h.detach().mean().clamp(max=0.1)
        return h * self.scale.exp().clamp(max=100) + torch.where(self.mask > 0, self.scale, 0.5)


def test_limits_of_single_samples_and_of_parameters_cost_nothing() -> None:
    model = PerSample()
    plain = copy.deepcopy(model)
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    for x in batches():
        for each in (model, plain):
            each.zero_grad()
            loss_of(each(x)).backward()
        assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT
    assert not any("whole" in event.message or "passes" in event.message for event in run.events)


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


@pytest.mark.parametrize("stepping", [False, True])
def test_packed_sequences_that_come_longest_first_are_proven_in_this_order(stepping: bool) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.GRU(7, 4, batch_first=True).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            _, h = self.net(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
            return self.head(h[-1])

    torch.manual_seed(7)
    model = Packed()
    plain = copy.deepcopy(model)
    x, y = torch.randn(12, 6, 7).double(), torch.arange(12) % 3
    lengths = torch.randint(1, 7, (12,)).sort(descending=True).values
    F.cross_entropy(plain(x, lengths), y).backward()
    if stepping:
        seen = Seen(model)
        run = memfit.wrap(
            model,
            SGD(model.parameters(), 0.0),
            micro_batch=4,
            loss_fn=lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]),
            before_step=seen,
        )
        run.step((x, lengths, y))
        found = seen.gradients[-1]
    else:
        memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
        F.cross_entropy(model(x, lengths), y).backward()
        found = gradients_of(model)
    assert relative_error(found, gradients_of(plain)) <= EXACT


def test_a_loss_that_adds_up_one_mean_per_sample_is_cut() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            rows = self.net(x)
            return torch.stack([F.cross_entropy(row[None], label[None]) for row, label in zip(rows, y)]).mean()

    model = Listed()
    plain = copy.deepcopy(model)
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    for size in (12, 11):
        x, y = batches()[0][:size], torch.arange(size) % 3
        for each in (model, plain):
            each.zero_grad()
            each(x, y).backward()
        assert relative_error(gradients_of(model), gradients_of(plain)) <= EXACT


class Holding(torch.autograd.Function):
    """Keeps an object until its graph goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Callable[[], object]) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def test_what_was_seen_of_limits_keeps_no_graph() -> None:
    """A proof keeps what it saw of the whole and of all parts: their activations would be there at once."""
    model, x = Scaled(STATISTICS["mean"], False), torch.randn(5, 7).double()
    held = lambda: None  # noqa: E731
    kept = weakref.ref(held)
    with Limits(5, [x]) as limits:
        outputs = F.relu(model.scaled(Holding.apply(model.net(x), held)).mean(0))
    seen = limits.of([outputs])
    assert any(each is not None for each in seen.calls["relu"])
    del held, outputs, limits
    assert kept() is None
