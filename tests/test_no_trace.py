"""Law 4, no trace: planning leaves everything as it was, bit for bit, also when it fails or is interrupted.

"Everything": parameters, buffers, gradients, optimizer state, random state, modes, hooks, attributes and the loader's position.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, wrapped
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from zoo import FAMILIES, Family, first_batch

import memfit


class Busy(nn.Module):
    """Draws, writes buffers and attributes, and can be told to fail after so many forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = mlp(dropout=0.3), nn.BatchNorm1d(7).double()
        self.register_buffer("running", torch.zeros(7, dtype=torch.float64))
        self.calls, self.lengths = 0, [0]
        self.error: BaseException | None = None
        self.after = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.lengths.append(len(x))
        self.running += x.detach().sum(0)
        noise = random.random() + float(numpy.random.rand())
        if self.error is not None and self.calls > self.after:
            raise self.error
        return self.net(self.norm(x) + 0 * noise)


def photograph(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copies of everything that planning has to leave alone."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identities": [id(p) for p in (*model.parameters(), *model.buffers())],
        "versions": [p._version for p in model.parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "modes": [(module.training, p.requires_grad) for module in model.modules() for p in module.parameters()],
        "hooks": [
            (list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks), list(m._state_dict_hooks))
            for m in model.modules()
        ],
        "parameter hooks": [p._backward_hooks for p in model.parameters()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "values": [(getattr(m, "calls", None), list(getattr(m, "lengths", []))) for m in model.modules()],
    }


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert found == wanted, where


def begun(model: nn.Module, loss: Callable[[], Tensor]) -> Optimizer:
    """An optimizer with state, and a model with gradients, as in the middle of training."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loss().backward()
    optimizer.step()
    return optimizer


def test_planning_leaves_no_trace() -> None:
    """Everything is as before at the moment the planned micro-batches begin: the call returns before they run."""
    model, (x, y) = Busy(), points()
    optimizer = begun(model, lambda: F.cross_entropy(model(x), y))
    memfit.wrap(model, optimizer, micro_batch=5)
    before = photograph(model, optimizer)
    out = model(x)  # learns, profiles, proves; runs nothing of the batch
    assert_same(photograph(model, optimizer), before)
    del out


def test_the_whole_batch_runs_from_where_planning_began() -> None:
    """A batch that fits draws what it would have drawn, though planning drew much more in between."""
    model, plain, (x, y) = Busy(), Busy(), points()
    memfit.wrap(model, AdamW(model.parameters()))
    for m in (model, plain):
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        F.cross_entropy(m(x), y).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert (model.calls, model.lengths) == (plain.calls, plain.lengths)


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm", "frozen"])
def test_planning_leaves_no_trace_on_families(name: str) -> None:
    family: Family = FAMILIES[name]
    model, batch = family.build(dropout=0.1), first_batch(family)
    optimizer = begun(model, lambda: family.script_loss(model, batch))
    memfit.wrap(model, optimizer, micro_batch=5)
    before = photograph(model, optimizer)
    out = model(*batch) if family.returns_loss else model(batch[0])
    assert_same(photograph(model, optimizer), before)
    del out


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("after", range(0, 12, 2))
def test_failing_and_interrupted_planning_leaves_no_trace(error: BaseException, after: int) -> None:
    """The model raises at its n-th forward, wherever planning then is: nothing changed, and the next call plans anew."""
    model, (x, y) = Busy(), points()
    optimizer = begun(model, lambda: F.cross_entropy(model(x), y))
    memfit.wrap(model, optimizer, micro_batch=5)
    before = photograph(model, optimizer)
    model.error, model.after = error, model.calls + after
    try:
        out = model(x)
    except BaseException as raised:
        assert raised is error
    else:
        del out
    model.error, model.after = None, 0
    assert_same(photograph(model, optimizer), before)
    assert_clean_modes()
    out = model(x)
    F.cross_entropy(out, y).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("after", range(3))
def test_an_interrupt_while_a_batch_runs_hands_nothing_over(known: bool, after: int) -> None:
    """Ctrl-C in any micro-batch: gradients, buffers and random state are those before the batch, and it can run again."""
    model, (x, y) = Busy(), points()
    optimizer = begun(model, lambda: F.cross_entropy(model(x), y))
    wrapped(model, 5, optimizer=optimizer)

    def train() -> None:
        out = model(x)
        (F.cross_entropy(out, y) if known else out.exp().mean()).backward()

    train()
    optimizer.zero_grad()
    before, forwards = photograph(model, optimizer), model.calls
    model.error, model.after = KeyboardInterrupt(), model.calls + after
    with pytest.raises(KeyboardInterrupt):
        train()
    model.error = None
    found = photograph(model, optimizer)
    assert model.calls == forwards + after + 1
    for key in before.keys() - KEPT_BY_PYTHON:
        assert_same(found[key], before[key], key)
    assert_clean_modes()
    train()
    assert all(p.grad is not None for p in model.parameters())


KEPT_BY_PYTHON = {"values"}
"""What a forward that really ran leaves behind outside torch: its counters."""


@pytest.mark.parametrize("after", range(3, 6))
def test_an_interrupt_in_the_second_pass_hands_nothing_over(after: int) -> None:
    model, (x, _) = Busy(), points()
    wrapped(model, 5)
    model(x).exp().mean().backward()
    model.zero_grad()
    model.error, model.after = KeyboardInterrupt(), model.calls + after
    loss = model(x).exp().mean()
    state, buffers = torch.get_rng_state(), {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(dict(model.named_buffers()), buffers)
    assert_clean_modes()


def assert_clean_modes() -> None:
    """No mode of ours is left active, and autograd records."""
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch._C._len_torch_function_stack() == 0


def test_wrapping_leaves_the_loader_where_it_is() -> None:
    """`wrap` and planning draw nothing: the batches are those of the plain loader, with the same generator state."""
    x, y = points(48)
    torch.manual_seed(5)
    plain = [bx.clone() for bx, _ in DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)]
    torch.manual_seed(5)
    model = mlp()
    state = torch.get_rng_state()
    run = memfit.wrap(
        model,
        AdamW(model.parameters()),
        DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),
        target_batch=12,
        micro_batch=5,
    )
    assert torch.equal(torch.get_rng_state(), state)
    found = []
    for bx, by in run.loader:
        F.cross_entropy(model(bx), by).backward()
        model.zero_grad()
        run.optimizer.step()
        found.append(bx.clone())
    assert_same(found, plain)


def test_a_wrap_that_fails_changes_nothing() -> None:
    model, loader = mlp(), DataLoader(TensorDataset(*points(48)), batch_size=4)
    optimizer = AdamW(model.parameters())
    before = photograph(model, optimizer)
    steps = dict(optimizer._optimizer_step_post_hooks)
    for wrong in ({"target_batch": 0}, {"budget": 6}, {"budget": "six"}, {"precision": "int8"}, {"checkpoint": ["nowhere"]}):
        with pytest.raises(ValueError):
            memfit.wrap(model, optimizer, loader, **wrong)
    assert_same(photograph(model, optimizer), before)
    assert optimizer._optimizer_step_post_hooks == steps
