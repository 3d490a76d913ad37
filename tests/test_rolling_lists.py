"""Lists of which a forward keeps the latest items, however it is written. They are as in plain PyTorch after each batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import mlp, points
from stateful import MODES, trained
from torch import Tensor, nn

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


def _replaced_now_and_then(model: Any, value: Any) -> None:
    model.log.append(value)
    if len(model.log) > KEPT + 1:
        model.log = model.log[-KEPT:]


def _put_into_a_copy(model: Any, value: Any) -> None:
    model.table["log"] = [*model.log, value]
    model.table = dict(model.table)
    model.log = model.table["log"][-KEPT:]


def _in_a_queue(model: Any, value: Any) -> None:
    model.queue.append(value)


KEEPS = (
    _appended_and_replaced, _replaced, _replaced_now_and_then, _appended_and_popped, _appended_and_deleted,
    _put_into_a_copy, _in_a_queue,
)  # fmt: skip
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


def _items(model: Any) -> list[Any]:
    return [*model.log, *model.queue, *model.table.get("log", ())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("keep", KEEPS)
def test_the_latest_items_are_those_of_plain_training(keep: Any, value: str, mode: str) -> None:
    model, batches = Rolling(keep, value), points(BATCH * STEPS)[0].split(BATCH)
    wanted = trained(copy.deepcopy(model), batches, mode, _items, wrapped=False)
    found = trained(model, batches, mode, _items, wrapped=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
