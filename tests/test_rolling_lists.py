"""Lists of which a forward keeps the latest items, however it is written. They are as in plain PyTorch after each batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import mlp, points
from torch import Tensor, nn
from torch.optim import SGD

import memfit

KEPT, STEPS, BATCH = 3, 6, 7


def _appended_and_replaced(model: Any, value: Any) -> None:
    model.log.append(value)
    model.log = model.log[-KEPT:]


def _replaced(model: Any, value: Any) -> None:
    model.log = [*model.log[-KEPT + 1 :], value]


def _appended_and_popped(model: Any, value: Any) -> None:
    model.log.append(value)
    if len(model.log) > KEPT:
        model.log.pop(0)


def _appended_and_deleted(model: Any, value: Any) -> None:
    model.log.append(value)
    del model.log[:-KEPT]


def _put_into_a_copy(model: Any, value: Any) -> None:
    model.table["log"] = [*model.log, value]
    model.table = dict(model.table)
    model.log = model.table["log"][-KEPT:]


def _in_a_queue(model: Any, value: Any) -> None:
    model.queue.append(value)


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: float(x.mean()),
    "size": len,
    "tensor": lambda x: x.detach().mean(0),
}


class Rolling(nn.Module):
    """Keeps the latest values of its inputs."""

    def __init__(self, keep: Any, value: str) -> None:
        super().__init__()
        self.net, self.keep, self.of = mlp(), keep, VALUES[value]
        self.log, self.table, self.queue = list[Any](), dict[str, Any](), deque[Any](maxlen=KEPT)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, self.of(x))
        return self.net(x)


def _trained(model: Rolling, mode: str, wrapped: bool) -> list[Tensor]:
    """What the model holds after each batch, and its parameters."""
    x, found = points(BATCH * STEPS)[0], list[Tensor]()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out.flip(0).flip(0) if mode == "replayed" else out).pow(2).mean()

    optimizer = SGD(model.parameters(), 0.1)
    step_mode = wrapped and mode == "loss"
    run = memfit.wrap(model, optimizer, micro_batch=3, loss_fn=loss_fn if step_mode else None) if wrapped else None
    for batch in x.split(BATCH):
        if run is not None and step_mode:
            run.step(batch)
        else:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        items = [*model.log, *model.queue, *model.table.get("log", ())]
        found += [torch.as_tensor(item, dtype=torch.float64) for item in items]
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("mode", ["loss", "accumulated", "replayed"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "keep",
    [_appended_and_replaced, _replaced, _appended_and_popped, _appended_and_deleted, _put_into_a_copy, _in_a_queue],
)
def test_the_latest_items_are_those_of_plain_training(keep: Any, value: str, mode: str) -> None:
    model = Rolling(keep, value)
    wanted = _trained(copy.deepcopy(model), mode, wrapped=False)
    found = _trained(model, mode, wrapped=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
