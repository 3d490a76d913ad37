"""Forwards whose outputs add up and whose gradients don't: refused by name where a batch is cut, exact where it runs whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import memfit


class AuxiliaryLoss(torch.autograd.Function):
    """Adds the gradient of a second loss to that of the first (Megatron's `MoEAuxLossAutoScaler`)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, torch.tensor(0.1, dtype=gradient.dtype)


class Reversed(torch.autograd.Function):
    """Gradient reversal (arXiv:1409.7495), entry by entry; with `centred`, less their mean over the samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, centred: bool) -> Tensor:
        ctx.centred = centred
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return (-(gradient - gradient.mean(0)) if ctx.centred else -gradient), None


def _noted(seen: list[float]) -> Any:
    def hook(gradient: Tensor) -> None:
        seen.append(float(gradient.norm()))

    return hook


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.head, self.probe = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 1)
        self.step, self.way = nn.Parameter(torch.tensor(0.3)), way
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)  # the bias of its keys has no gradient but rounding
        self.norm, self.drop, self.seen = nn.BatchNorm1d(5), nn.Dropout(0.3), list[float]()
        if way == "module hook that normalises":
            self.head.register_full_backward_hook(lambda module, given, out: (given[0] / given[0].norm(),))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        match self.way:
            case "auxiliary loss":
                h = AuxiliaryLoss.apply(h, h.softmax(1).mean(0).square().sum())
            case "centred reversal":
                h = Reversed.apply(h, True)
            case "reversal":
                h = Reversed.apply(h, False)
            case "learned step":  # arXiv:1902.08153
                scale = 1 / math.sqrt(7 * h.numel())
                step = (self.step - self.step * scale).detach() + self.step * scale
                scaled = (h / step).clamp(-8, 7)
                h = (scaled + (scaled.round() - scaled).detach()) * step
            case "straight through":
                h = h + (h.round() - h).detach()
            case "straight through the mean":
                centred = h - h.mean(0)
                h = h.detach() + centred - centred.detach()
            case "hook that normalises" if h.requires_grad:
                h.register_hook(lambda g: g / g.norm())
            case "hook that scales" if h.requires_grad:
                h.register_hook(lambda g: 2 * g)
            case "attention":
                words = torch.stack([h, h.roll(1, 1), x[:, :5]], 1)
                h = self.attention(words, words, words)[0].sum(1)
            case "reentrant checkpoint":
                h = checkpoint(self.probe.weight.mul, h, use_reentrant=True)
            case "dropout":
                h = self.drop(h)
            case "batch norm":
                h = self.norm(h)
            case "mean of its own" | "sum of its own" if self.training and torch.is_grad_enabled():
                loss = self.probe(h.detach()).square()
                (loss.mean() if self.way == "mean of its own" else loss.sum()).backward()
        return self.head(h)


MIXED = ("auxiliary loss", "centred reversal", "learned step", "straight through the mean", "hook that normalises",
         "module hook that normalises")  # fmt: skip
OWN = ("mean of its own", "sum of its own")
EQUAL = ("reversal", "straight through", "hook that scales", "attention", "reentrant checkpoint")


def _trained(way: str, dtype: torch.dtype = torch.float64, **line: Any) -> list[Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(3, 9, 6, dtype=dtype), torch.randint(0, 3, (3, 9))
    model = Net(way).to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1)
    if line:
        memfit.wrap(model, optimizer, **line)
    for inputs, labels in zip(x, y):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("way", MIXED)
def test_a_backward_that_mixes_samples_is_refused_by_the_name_of_a_parameter(way: str) -> None:
    with pytest.raises(memfit.Refused, match=r"backward of the forward mixes samples, or depends on their number"):
        _trained(way, micro_batch=3)


@pytest.mark.parametrize("way", OWN)
def test_a_forward_that_runs_a_backward_of_its_own_is_refused(way: str) -> None:
    with pytest.raises(memfit.Refused, match=r"runs a backward of its own.*probe"):
        _trained(way, micro_batch=3)


@pytest.mark.parametrize("way", [*MIXED, *OWN])
def test_it_runs_whole_where_the_batch_fits(way: str) -> None:
    for wanted, made in zip(_trained(way), _trained(way, budget="8GiB"), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", EQUAL)
def test_a_backward_by_sample_is_cut(way: str) -> None:
    for wanted, made in zip(_trained(way), _trained(way, micro_batch=2), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", [*EQUAL, "dropout", "batch norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_not_taken_for_mixing(way: str, dtype: torch.dtype) -> None:
    _trained(way, dtype, micro_batch=2)


@pytest.mark.parametrize("way", ["auxiliary loss", "learned step", "hook that normalises"])
def test_single_precision_shows_it(way: str) -> None:
    with pytest.raises(memfit.Refused, match="backward"):
        _trained(way, torch.float32, micro_batch=3)


def test_a_difference_is_accepted_by_the_name_of_the_module() -> None:
    torch.manual_seed(0)
    model = Net("centred reversal").double()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, micro_batch=3, allow_inexact=["body"])
    loss = F.cross_entropy(model(torch.randn(9, 6).double()), torch.randint(0, 3, (9,)))
    loss.backward()
    optimizer.step()
    assert any("body" in event.message for event in run.report().events if event.kind == "not equal")


def test_step_mode_refuses_it_where_values_alone_would_pass() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(18, 6), torch.randint(0, 3, (18,)))
    model = Net("centred reversal")
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(memfit.Refused, match="backward"):
        run = memfit.wrap(
            model, optimizer, DataLoader(data, batch_size=9), micro_batch=3,
            loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        )  # fmt: skip
        for batch in run.loader:
            run.step(batch)


class TwoOutputs(nn.Module):
    """One output mixes by its values, the other one in its backward alone."""

    def __init__(self, distance: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.aside, self.distance = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(6, 4), distance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aside = self.aside(x)
        other = (aside - aside.detach()).square().sum(1).sqrt() if self.distance else aside - aside.mean(0)
        return self.head(Reversed.apply(self.body(x), True)), other


@pytest.mark.parametrize("distance", [False, True], ids=["accepted", "infinite gradient"])
def test_what_one_output_hides_is_proven_for_the_others(distance: bool) -> None:
    torch.manual_seed(0)
    model = TwoOutputs(distance)
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=3, allow_inexact=["output[1]"])
    with pytest.raises(memfit.Refused, match="backward"):
        model(torch.randn(9, 6))


def test_the_default_device_does_not_matter() -> None:
    torch.manual_seed(0)
    model, x, y = Net("reversal"), torch.randn(9, 6), torch.randint(0, 3, (9,))
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=3)
    try:
        torch.set_default_device("meta")
        F.cross_entropy(model(x), y).backward()
    finally:
        torch.set_default_device(None)
    assert model.body.weight.grad is not None


class Autocast(nn.Module):
    """Computes in half precision inside, and returns float32: as accelerate makes a model's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x).float()


def test_half_precision_inside_a_forward_is_rounding() -> None:
    for seed in range(4):
        model = Autocast()
        memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=3)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
        model(x).logsumexp(1).mean().backward()
