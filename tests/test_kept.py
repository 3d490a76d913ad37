"""Activations that replay keeps from its first pass: the same gradients wherever the second one could have run instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, wrapped
from pairwise import once
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from zoo.plain import relative_error

import memfit

EXACT = 1e-12
Seen = list[dict[str, Tensor | None]]
Step = Callable[[nn.Module, Tensor, int], None]
"""From the model, a batch and its number to gradients."""


def spread(out: Tensor) -> Tensor:
    """A loss that needs the whole output."""
    centred = out - out.mean(0)
    return (centred.t() @ centred).square().mean()


class Pruned(nn.Linear):
    """Its mask is written by every forward, and saved for backward."""

    def __init__(self) -> None:
        super().__init__(7, 4)
        self.register_buffer("mask", torch.ones(4, 7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mask.copy_(self.weight.abs() > 0.05)
        return F.linear(x, self.weight * self.mask, self.bias)


class Constrained(nn.Linear):
    """The constraint of EEGNet's ports: rows of the weight are at most so long."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


class Scalars(nn.Module):
    """Two numbers for the batch, which are means over its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 8), Fails(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return out.square().mean(), out.exp().mean()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Fails) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.owner.armed is not None:
            ctx.owner.armed -= 1
            if ctx.owner.armed < 0:
                ctx.owner.armed = None
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return gradient, None


class Fails(nn.Module):
    """Memory runs out in its backward, once it is armed, after so many others."""

    armed: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        return _Failing.apply(x, self)


def trained(
    make: Callable[[], nn.Module], step: Step, keep: int | None = None, **settings: Any
) -> tuple[Seen, nn.Module]:
    """Gradients of three batches of 12 and the model; `keep` micro-batches of 3, None without memfit, -1 as planned."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(points(36)[0]), batch_size=12)
    run = None
    if keep == -1:
        run = memfit.wrap(model, optimizer, loader, micro_batch=3, **settings)
    elif keep is not None:
        fields = {"mode": "replay", "keep": keep} | settings.pop("fields", {})
        run = wrapped(model, 3, optimizer=optimizer, loader=loader, fields=fields, **settings)
    loader = loader if run is None else run.loader
    seen: Seen = []
    for number, (x,) in enumerate(loader):
        optimizer.zero_grad()
        step(model, x, number)
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    if run is not None:
        run.undo()
    return seen, model


def assert_alike(make: Callable[[], nn.Module], step: Step, keep: int, **settings: Any) -> None:
    (want, plain), (got, model) = trained(make, step), trained(make, step, keep, **settings)
    assert [relative_error(mine, theirs) for mine, theirs in zip(got, want)] == pytest.approx([0.0] * 3, abs=EXACT)
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(p, q, rtol=EXACT, atol=EXACT)


KEEP = pytest.mark.parametrize("keep", [0, 1, 3, -1])


@KEEP
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_an_output_may_be_read_in_inference_mode(keep: int, detached: bool, first: int) -> None:
    """Accuracies are: nothing would be recorded of what runs for that."""

    def step(model: nn.Module, x: Tensor, number: int) -> None:
        out = model(x)
        if number >= first:
            with torch.inference_mode():
                assert (out.detach() if detached else out).argmax(1).sum() >= 0
        spread(out).backward()

    assert_alike(mlp, step, keep)


@KEEP
@pytest.mark.parametrize("loss", [spread, lambda out: F.mse_loss(out, torch.ones_like(out))], ids=["replay", "accumulate"])
def test_a_forward_may_give_its_weight_other_data(keep: int, loss: Callable[[Tensor], Tensor]) -> None:
    def step(model: nn.Module, x: Tensor, number: int) -> None:
        loss(model(x)).backward()

    assert_alike(lambda: nn.Sequential(Constrained(7, 8), nn.Tanh(), nn.Linear(8, 4)), step, keep)


def test_planning_leaves_the_data_that_a_parameter_had() -> None:
    model = nn.Sequential(Constrained(7, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    before = model[0].weight.detach().clone()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=3, loss_fn=lambda m, x: spread(m(x)), sample=points(12)[0])
    assert torch.equal(model[0].weight, before)


@KEEP
def test_parameters_may_be_given_other_data_before_backward(keep: int) -> None:
    def step(model: nn.Module, x: Tensor, number: int) -> None:
        loss = spread(model(x))
        for p in model.parameters():
            p.data = p.data.clone()
        loss.backward()

    assert_alike(mlp, step, keep)


@pytest.mark.parametrize("keep", [0, 1, -1])
def test_buffers_that_graphs_hold_may_be_written_by_the_next_forward(keep: int) -> None:
    def step(model: nn.Module, x: Tensor, number: int) -> None:
        spread(model(x)).backward()

    assert_alike(Pruned, step, keep)


@KEEP
@pytest.mark.parametrize(("others", "scalars"), once(product((0, 1, 2, 3), (False, True))))
def test_memory_may_run_out_in_what_is_kept(keep: int, others: int, scalars: bool) -> None:
    def step(model: nn.Module, x: Tensor, number: int) -> None:
        out = model(x)
        loss = out[0] * out[1] + out[0].sqrt() if scalars else spread(out)
        fails = next(m for m in model.modules() if isinstance(m, Fails))
        fails.armed = others if number == 1 and "forward" in vars(model) else None
        loss.backward()
        fails.armed = None

    def make() -> nn.Module:
        return Scalars() if scalars else nn.Sequential(nn.Linear(7, 8), Fails(), nn.Linear(8, 4))

    assert_alike(make, step, keep)


@KEEP
def test_modes_may_change_before_backward_where_blocks_are_checkpointed(keep: int) -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(x) * (1.0 if self.training else 0.5))

    def step(model: nn.Module, x: Tensor, number: int) -> None:
        loss = spread(model(x))
        model.eval()
        loss.backward()
        model.train()

    def make() -> nn.Module:
        return nn.ModuleDict({"blocks": nn.Sequential(nn.Sequential(Halved()), nn.Sequential(Halved()))})["blocks"]

    settings = {"checkpoint": "all"} if keep == -1 else {"fields": {"checkpoint": ("0", "1")}}
    assert_alike(make, step, keep, **settings)


def test_what_was_planned_goes_on_where_planning_again_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients turn out to be zeroed before a batch runs, which leaves room; but something else may be held meanwhile."""
    x = points(36)[0]
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, DataLoader(TensorDataset(x), batch_size=12), micro_batch=3)
    spread(model(x[:12])).backward()
    before = run.plan
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    core: Any = run._core
    full = core.memory.budget()
    monkeypatch.setattr(core.memory, "budget", lambda: replace(full, held=full.limit))
    spread(model(x[:12])).backward()
    assert run.plan is before and before is not None
    run.undo()
    assert run.plan is before
