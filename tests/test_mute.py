"""Batches of which a mask leaves nothing: their losses tell nothing of how they are weighted, on one process or on several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from processes import Processes
from stepping import Seen, sgd
from torch import Tensor, nn
from zoo.plain import Gradients, gradients_of

import memfit

EXACT = 1e-12
X, Y = points(12)
MASKS: list[Tensor] = [torch.tensor([float(bit) for bit in bits], dtype=torch.float64) for bits in (
    "000000000000", "110000000000", "000000010100", "100010001000", "111111111111", "000000000001",
)]  # fmt: skip
FIRST = [MASKS, MASKS[1:], MASKS[3:] + MASKS[:3]]


@pytest.fixture(autouse=True)
def strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT", "strict")


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def masked(model: nn.Module, batch: Any) -> Tensor:
    x, labels, mask = batch
    return (F.cross_entropy(model(x), labels, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def plain(masks: list[Tensor]) -> list[Gradients]:
    model = mlp()
    found = []
    for mask in masks:
        model.zero_grad()
        masked(model, (X, Y, mask)).backward()
        found.append(gradients_of(model))
    return found


def far(found: list[Gradients], want: list[Gradients]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for a, b in zip(found, want) for name in b)


def stepped(masks: list[Tensor], sizes: tuple[int, ...]) -> list[Gradients]:
    model = mlp()
    seen = Seen(model)
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn=masked, micro_batch=4, before_step=seen)
    rank = int(os.environ.get("RANK", "0"))
    first = sum(sizes[:rank])
    for mask in masks:
        run.step(tuple(each[first : first + sizes[rank]] for each in (X, Y, mask)))
    run.undo()
    return seen.gradients


@pytest.mark.parametrize("masks", FIRST, ids=["nothing first", "some first", "more first"])
def test_what_a_mask_leaves_weighs_once_there_is_something(masks: list[Tensor]) -> None:
    assert far(stepped(masks, (12,)), plain(masks)) <= EXACT


@pytest.mark.parametrize("sizes", [(6, 6), (9, 3)])
@pytest.mark.parametrize("masks", FIRST[:2], ids=["nothing first", "some first"])
def test_a_process_that_has_nothing_of_a_batch_weighs_as_the_others_do(
    two: Processes, masks: list[Tensor], sizes: tuple[int, int]
) -> None:
    for found in two.run(stepped, masks, sizes):
        assert far(found, plain(masks)) <= EXACT


class Own(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return masked(self.net, (x, labels, mask))


@pytest.mark.parametrize("masks", FIRST, ids=["nothing first", "some first", "more first"])
def test_a_models_own_loss(masks: list[Tensor]) -> None:
    model = Own()
    memfit.wrap(model, sgd(model), micro_batch=4)
    found = []
    for mask in masks:
        model.zero_grad()
        model(X, Y, mask).backward()
        found.append(gradients_of(model.net))
    assert far(found, plain(masks)) <= EXACT
