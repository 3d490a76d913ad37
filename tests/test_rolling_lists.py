"""Lists and banks of which a forward keeps the latest items or rows, however written. They are those of plain PyTorch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import mlp, points
from stateful import MODES, trained
from torch import Tensor, nn

from memfit import Refused

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


ROWS = 20
BANKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the last rows": lambda rows, h: torch.cat([rows, h])[-ROWS:],
    "the last rows, three for a sample": lambda rows, h: torch.cat([rows, h.repeat_interleave(3, 0)])[-ROWS:],
    "rows until there are enough": lambda rows, h: torch.cat([rows, h])[:ROWS],
    "all rows": lambda rows, h: torch.cat([rows, h]),
}
"""How a forward keeps rows of its samples."""
BY_POSITION: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows of the first samples": lambda rows, h: torch.cat([rows, h[:6]])[-ROWS:],
    "rows of the last samples": lambda rows, h: torch.cat([rows, h[-6:]])[-ROWS:],
    "every second sample's rows": lambda rows, h: torch.cat([rows, h[::2]])[-ROWS:],
    "half of the rows": lambda rows, h: torch.cat([rows, h.chunk(2)[0]])[-ROWS:],
    "rows of marked samples": lambda rows, h: torch.cat([rows, h[torch.arange(len(h)) < 6]])[-ROWS:],
    "the latest rows first": lambda rows, h: torch.cat([h, rows])[:ROWS],
}
"""What micro-batches in turn leave otherwise than the whole batch, if it has seven samples and a proof five."""


class Bank(nn.Module):
    """Keeps rows of its samples, from none or from `begun` of them on."""

    def __init__(self, keep: Callable[[Tensor, Tensor], Tensor], begun: int) -> None:
        super().__init__()
        self.net, self.keep = mlp(), keep
        self.register_buffer("rows", torch.zeros(begun, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.rows = self.keep(self.rows, out.detach())
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begun", [0, ROWS])
@pytest.mark.parametrize("keep", [*BANKS, *BY_POSITION])
def test_the_rows_of_a_bank_are_those_of_plain_training(keep: str, begun: int, mode: str) -> None:
    model, batches = Bank({**BANKS, **BY_POSITION}[keep], begun), points(BATCH * STEPS)[0].split(BATCH)
    wanted = trained(copy.deepcopy(model), batches, mode, lambda m: m.rows, wrapped=False)
    with nullcontext() if keep in BANKS else pytest.raises(Refused):
        found = trained(model, batches, mode, lambda m: m.rows, wrapped=True)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
