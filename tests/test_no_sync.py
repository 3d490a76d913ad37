"""Law 9, no added host synchronisation: on the CPU, no `_local_scalar_dense` call that the plain loop does not make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points, unseen, wrapped
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import FAMILIES, first_batch

import memfit
from memfit.engine import random_state

WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten._unique2.default,
)
"""Operations whose result has to be known on the host."""


@pytest.fixture(autouse=True, scope="module")
def _without_generators() -> None:
    """Those that other tests left in reference cycles, which may go through autograd's nodes, would still be compared."""
    random_state._OWN.clear()


class Waits(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def waits_of(step: Callable[[], Any]) -> list[str]:
    with Waits() as waits:
        step()
    return sorted(waits.names)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "ignored": lambda out, y: F.cross_entropy(out, y, ignore_index=2),
    "weighted": lambda out, y: F.cross_entropy(out, y, torch.arange(1.0, 5.0, dtype=out.dtype)),
    "weighted squares": lambda out, y: F.mse_loss(out, out.detach() + 1, weight=torch.ones_like(out)),
    "replay": lambda out, y: unseen(out).square().mean(),
    "both": lambda out, y: F.cross_entropy(out, y) + unseen(out).square().mean(),
}


def test_waiting_is_seen() -> None:
    """The instrument itself."""
    assert waits_of(lambda: torch.ones(()).item()) == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_does_not_wait_more_often(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    x, y = points()
    x = x.to(dtype)

    def step_of(model: nn.Module) -> Callable[[], None]:
        optimizer = AdamW(model.parameters(), foreach=True)

        def step() -> None:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    plain, model = mlp().to(dtype), mlp().to(dtype)
    wrapped(model, 5)
    one, other = step_of(plain), step_of(model)
    for _ in range(2):  # the first batch is learnt on, the second repeats the proofs
        one()
        other()
    assert waits_of(other) == waits_of(one)


@pytest.mark.parametrize("name", ["gpt", "bert", "vit", "lstm", "superres", "resnet"])
def test_a_familys_step_does_not_wait_more_often(name: str) -> None:
    family = FAMILIES[name]
    for package in family.requires:
        pytest.importorskip(package)
    batch = first_batch(family)
    found = []
    for cut in (False, True):
        model = family.build(dropout=0.1)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if cut:
            wrapped(model, 5, optimizer=optimizer)

        def step(model: nn.Module = model, optimizer: SGD = optimizer) -> None:
            optimizer.zero_grad()
            family.script_loss(model, batch).backward()
            optimizer.step()

        for _ in range(3):
            step()
        found.append(waits_of(step))
    plain, cut_ = found
    # A model that itself waits does so in each of its three micro-batches.
    assert len(cut_) <= 3 * len(plain)


@pytest.mark.parametrize("name", ["gpt", "lstm", "superres"])
def test_step_mode_does_not_wait(name: str) -> None:
    family = FAMILIES[name]
    batch = first_batch(family)
    model = family.build()
    run = wrapped(model, 5, loss_fn=family.loss)
    for _ in range(5):  # (the proof is repeated with the second and the fifth)
        run.step(batch)
    assert waits_of(lambda: run.step(batch)) == []


def test_a_planned_step_does_not_wait() -> None:
    model, (x, y) = mlp().float(), points()
    x = x.float()
    optimizer = SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=5)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(5):  # cutting is proven at the first, the second and the fifth step; proofs wait
        step()
    assert waits_of(step) == []
