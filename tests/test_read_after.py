"""Losses, and parts of losses, that are read after their step: what they came to in the pass, with no forward for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, mlp, points, wrapped
from torch import Tensor, nn
from torch.optim import SGD

from memfit.modes import script_passes as passes

X, Y = points(12)
TARGET = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
Parts = tuple[Tensor, Tensor]
"""The loss that backward is called for, and what is logged after the step."""


def added(out: Tensor) -> Parts:
    first, second = F.cross_entropy(out, Y), F.mse_loss(out, TARGET)
    return first + 0.5 * second, second


def in_place(out: Tensor) -> Parts:
    first, second = F.cross_entropy(out, Y), out.pow(2).mean()
    loss = first * 1.0
    loss += second
    return loss, first


def divided(out: Tensor) -> Parts:
    loss = F.cross_entropy(out, Y) + out.abs().mean()
    return loss / 4, loss


def of_one(out: Tensor) -> Parts:
    loss = out.pow(2).mean()
    return loss * 8, loss


def summed(out: Tensor) -> Parts:
    first, second = F.mse_loss(out, TARGET, reduction="sum"), (out.exp().sum(1) * 0.1).sum()
    return first / 12 - second / 12, second


def with_constants(out: Tensor) -> Parts:
    first = F.cross_entropy(out, Y) + 1.0
    return first + 0.1 * out.square().mean(), first - 1.0


def counted(out: Tensor) -> Parts:
    mask = (Y > 0).double()
    first = (F.cross_entropy(out, Y, reduction="none") * mask).sum() / mask.sum()
    return first + F.mse_loss(out, TARGET), first


WAYS: dict[str, Callable[[Tensor], Parts]] = {
    f.__name__: f for f in (added, in_place, divided, of_one, summed, with_constants, counted)
}
READS: dict[str, Callable[[Tensor], list[float]]] = {
    "item": lambda logged: [logged.item()],
    "float": lambda logged: [float(logged.detach())],
    "numpy": lambda logged: [float(logged.detach().numpy())],
    "stacked": lambda logged: torch.stack([logged, logged]).tolist(),
    "in words": lambda logged: [float(f"{logged:.6f}")],
}


def trained(
    way: Callable[[Tensor], Parts], read: Callable[[Tensor], list[float]], wrap: bool
) -> tuple[list[list[float]], list[Tensor], int]:
    """What was logged, the parameters, and the samples that forwards saw in the last step."""
    model = mlp()
    seen = Forwards(model[0])
    optimizer = SGD(model.parameters(), 0.1)
    if wrap:
        wrapped(model, 5, optimizer=optimizer)
    logged = []
    for _ in range(3):
        seen.sizes.clear()
        loss, part = way(model(X))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logged.append([*read(part), loss.item()])
    return logged, [p.detach().clone() for p in model.parameters()], sum(seen.sizes)


@pytest.mark.parametrize("kept", [True, False], ids=["outputs kept", "outputs too large to keep"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_after_the_step(way: str, read: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(passes, "worth_keeping", lambda *_: frozenset())
    want, parameters, _ = trained(WAYS[way], READS[read], wrap=False)
    got, mine, samples = trained(WAYS[way], READS[read], wrap=True)
    for one, other in zip(got, want):
        assert one == pytest.approx(other, rel=1e-12)
    assert max(float((a - b).abs().max()) for a, b in zip(mine, parameters)) <= 1e-12
    assert samples == len(X)


def test_a_part_that_is_read_after_the_step_has_no_backward_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in plain PyTorch, whose graph has parameters in it that were written since."""
    monkeypatch.setattr(passes, "worth_keeping", lambda *_: frozenset())
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    wrapped(model, 5, optimizer=optimizer)
    for _ in range(2):
        out = model(X)
        first, second = F.cross_entropy(out, Y), F.mse_loss(out, TARGET)
        (first + second).backward()
        optimizer.step()
    total = torch.stack([first, second]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


class WithLoss(nn.Module):
    """Returns a loss beside its output, which the script only logs."""

    def __init__(self, own: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.own = mlp(), own

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net(x)
        return out, self.own(out, labels)


IGNORED = torch.where(torch.arange(12) % 5 < 2, -100, Y)
OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, labels: out.square().mean(),
    "sum": lambda out, labels: out.square().sum(),
    "known mean": lambda out, labels: F.cross_entropy(out, labels),
    "mean by a count": lambda out, labels: (out.sum(1) * (labels >= 0)).sum() / (labels >= 0).sum(),
    "two means": lambda out, labels: F.cross_entropy(out, labels.clamp(0)) + 0.1 * out.abs().mean(),
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("read", ["before the step", "after the step", "in a list"])
def test_a_loss_of_the_models_own_that_is_only_read(own: str, read: str) -> None:
    found: list[list[float]] = []
    for cut in (False, True):
        torch.manual_seed(0)
        model = WithLoss(OWN[own])
        optimizer = SGD(model.parameters(), lr=0.1)
        if cut:
            wrapped(model, 5, optimizer=optimizer)
        told: list[float] = []
        kept: list[Tensor] = []
        for _ in range(3):
            out, loss = model(X, IGNORED)
            optimizer.zero_grad()
            F.mse_loss(out, TARGET).backward()
            if read == "before the step":
                told.append(loss.item())
            optimizer.step()
            if read == "after the step":
                told.append(float(loss.detach()))
            kept.append(loss.detach())
        found.append([*told, *map(float, kept), *(p.sum().item() for p in model.parameters())])
    assert found[1] == pytest.approx(found[0], rel=1e-10)


@pytest.mark.parametrize("own", ["known mean", "mean by a count"])
def test_micro_batches_that_a_loss_counts_nothing_of_add_nothing(own: str) -> None:
    labels = torch.where((torch.arange(12) >= 5) & (torch.arange(12) < 10), -100, Y)
    found = []
    for cut in (False, True):
        torch.manual_seed(0)
        model = WithLoss(OWN[own])
        optimizer = SGD(model.parameters(), lr=0.1)
        if cut:
            wrapped(model, 5, optimizer=optimizer)
        for each in (IGNORED, labels):
            out, loss = model(X, each)
            optimizer.zero_grad()
            F.mse_loss(out, TARGET).backward()
            optimizer.step()
            found.append(loss.item())
    assert found[2:] == pytest.approx(found[:2], rel=1e-10)


def test_a_count_that_fails_does_not_take_another_micro_batchs_output() -> None:
    """Found as gradients of the micro-batch before."""
    found = []
    for cut in (False, True):
        torch.manual_seed(0)
        model = WithLoss(lambda out, mask: (out.square().sum(1) * mask).sum() / mask.sum())
        optimizer = SGD(model.parameters(), lr=0.1)
        if cut:
            wrapped(model, 5, optimizer=optimizer)
        for step in range(3):
            mask = (torch.arange(12) % 5 > 1).double()
            if step == 2:
                mask[7] = 0.5
            out, loss = model(X, mask)
            optimizer.zero_grad()
            F.mse_loss(out, TARGET).backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
        del loss
    for wanted, made in zip(found[:3], found[3:], strict=True):
        for a, b in zip(wanted, made, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
