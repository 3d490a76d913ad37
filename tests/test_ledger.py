"""What a ledger makes of odd models and steps: on fake tensors the same as on real ones, phase by phase, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plainloop import PlainLoop, peaks, traced
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

from memfit.profiling.loop import Loop
from memfit.tracing.fake import FakeWorld
from memfit.tracing.ledger import Ledger

WIDTH, SAMPLES = 24, 4
NUMBER = 4
"""Bytes of the gradient that backward begins with: memfit makes it, and holds it a little longer than autograd would."""

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "mse, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse, each": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "mse, spread": lambda x, y: F.mse_loss(x, y[:1].expand_as(y)),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce": F.binary_cross_entropy,
    "bce of logits": F.binary_cross_entropy_with_logits,
    "soft margin": F.soft_margin_loss,
    "kl": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    "poisson": F.poisson_nll_loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_holds_on_fakes_what_it_holds_in_a_real_run(name: str) -> None:
    """Some keep one value per element in the memory of their only number."""
    x, y = torch.rand(8, 16), torch.rand(8, 16)
    real = LOSSES[name](x, y)
    world = FakeWorld()
    fakes = world.mode.from_tensor(x), world.mode.from_tensor(y)
    with world.entered():
        for _ in range(2):  # the second time from what was learnt
            fake = LOSSES[name](*fakes)
            assert fake.shape == real.shape
            assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


CTC: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "lengths in tensors": lambda x, signs, times, lengths: F.ctc_loss(x, signs, times, lengths, zero_infinity=True),
    "lengths in lists": lambda x, signs, times, lengths: F.ctc_loss(x, signs, (9, 9, 7), (4, 2, 3), reduction="sum"),
    "one after the other": lambda x, signs, times, lengths: F.ctc_loss(
        x, signs.view(-1)[:9], (9, 9, 7), (4, 2, 3), reduction="sum"
    ),
    "each": lambda x, signs, times, lengths: F.ctc_loss(x, signs, times, lengths, reduction="none").sum(),
}


@pytest.mark.parametrize("name", CTC)
def test_what_ctc_keeps_for_backward_is_traced(name: str) -> None:
    """A value per step and place in the longest target, whose length is a value: what pads the targets bounds it."""
    scores, signs = torch.randn(9, 3, 6).requires_grad_(), torch.randint(1, 6, (3, 4))
    lengths = torch.tensor([9, 9, 7]), torch.tensor([4, 2, 3])

    def bytes_taken(make: Callable[[Tensor], Tensor]) -> tuple[int, tuple[int, ...]]:
        with Ledger(torch.device("cpu")) as ledger:
            x, *others = map(make, (scores, signs, *lengths))
            ledger.restart()
            ledger.window()
            loss = CTC[name](x.log_softmax(2), *others)
            (gradient,) = torch.autograd.grad(loss, x)
        return ledger.timeline().growth(1), tuple(gradient.shape)

    world = FakeWorld()
    real = bytes_taken(lambda tensor: tensor)
    with world.entered():
        assert bytes_taken(world.twin) == real


class Net(nn.Module):
    """Two layers, a norm with statistics, a layer that nothing uses, and between them what a case is about."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.unused = nn.BatchNorm1d(2 * WIDTH), nn.Linear(3, 3)
        self.inner = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.register_buffer("scale", torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.norm(self.first(x)) * self.scale))


def block(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.inner(F.gelu(x)))


def saved_twice(net: Any, x: Tensor) -> Tensor:
    y = x.exp()
    return y * y + x * y


def views(net: Any, x: Tensor) -> Tensor:
    left, right = x.view(-1, 2, WIDTH).unbind(1)
    return torch.cat([left.t().contiguous().t() * right, right.expand(2, *right.shape)[0]], 1)


def in_place(net: Any, x: Tensor) -> Tensor:
    y = net.inner(x)
    y[:, :3] += 1
    return y.mul_(0.5).relu_()


def through_hooks(net: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return block(net, x)


def moved(net: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return block(net, x)


def recomputed(net: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(block, net, x, use_reentrant=reentrant)


def autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.inner(block(net, x)).float()  # the copy of the weight is made once, and kept for both


def tied(net: Any, x: Tensor) -> Tensor:
    return F.linear(net.inner(x), net.inner.weight)


def frozen(net: Any, x: Tensor) -> Tensor:
    for p in (*net.first.parameters(), net.inner.weight):
        p.requires_grad_(False)
    return block(net, x)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    between: Callable[[Any, Tensor], Tensor] = block
    """What it computes between its layers."""
    optimizer: Callable[[Any], Optimizer] = AdamW
    """From parameters to an optimizer."""
    loop: Loop = Loop(plain=True)  # noqa: RUF009 - frozen
    """Its loop."""


def in_groups(parameters: Any) -> Optimizer:
    weights, others = [], []
    for p in parameters:
        (weights if p.dim() > 1 else others).append(p)
    return SGD([{"params": weights, "momentum": 0.9}, {"params": others, "lr": 0.01}], lr=0.1)


CASES = {
    "unused": Case(),
    "unused, staying": Case(loop=Loop(plain=True, zero_grad="to zero", max_grad_norm=1.0)),
    "saved twice": Case(saved_twice),
    "views": Case(views),
    "in place": Case(in_place),
    "hooks": Case(through_hooks),
    "save on cpu": Case(moved),
    "recomputed": Case(partial(recomputed, reentrant=False)),
    "recomputed, reentrant": Case(partial(recomputed, reentrant=True)),
    "autocast": Case(autocast),
    "tied": Case(tied),
    "frozen": Case(frozen),
    "groups": Case(optimizer=in_groups),
    "adamw by lists": Case(optimizer=partial(AdamW, foreach=True)),
    "adamw fused": Case(optimizer=partial(AdamW, fused=True)),
    "adamw one by one": Case(optimizer=partial(AdamW, foreach=False, amsgrad=True)),
    "sgd by lists": Case(optimizer=partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True)),
    "sgd fused": Case(optimizer=partial(SGD, lr=0.1, fused=True)),
    "sgd one by one": Case(optimizer=partial(SGD, lr=0.1, weight_decay=0.1)),
    "adagrad": Case(optimizer=Adagrad),
    "rmsprop": Case(optimizer=partial(RMSprop, momentum=0.9, centered=True, foreach=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_traced_is_what_real_tensors_take(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = Net(case.between)
    optimizer = case.optimizer(model.parameters())
    batch = torch.rand(6, WIDTH)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64))

    profile = traced(model, optimizer, loss_fn, batch, case.loop)
    assert profile.timeline is not None, profile.notes
    plain = PlainLoop(model, optimizer, loss_fn, batch, SAMPLES, case.loop).steps(3)
    assert peaks(profile.timeline, SAMPLES) == pytest.approx(peaks(plain, SAMPLES), rel=0, abs=NUMBER)
