"""State that a forward replaces where it finds a rare sample. Where a batch has none, it keeps what it was."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import mlp, points
from stateful import MODES, trained
from torch import Tensor, nn

import memfit

BATCH = 9
EACH = tuple(range(BATCH))


def _rows(model: Any, out: Tensor) -> None:
    model.kept = out.detach()


def _pair(model: Any, out: Tensor) -> None:
    model.kept = (out.detach(), len(out))


def _entries(model: Any, out: Tensor) -> None:
    model.kept = {"rows": out.detach(), "norm": out.detach().norm(dim=1)}


def _items(model: Any, out: Tensor) -> None:
    model.kept = out.detach()[:, 0].tolist()


def _samples(model: Any, out: Tensor) -> None:
    model.kept = len(out)


def _many(model: Any, out: Tensor) -> None:
    model.kept = 1000 * len(out)


def _total(model: Any, out: Tensor) -> None:
    model.kept = out.detach().pow(2).sum().item()


def _in_place(model: Any, out: Tensor) -> None:
    model.number.fill_(len(out))


def _through_data(model: Any, out: Tensor) -> None:
    model.number.data.fill_(len(out))


def _in_an_array(model: Any, out: Tensor) -> None:
    model.array[:] = out.detach().sum(0).numpy()


def _mean(model: Any, out: Tensor) -> None:
    model.kept = out.detach().mean(0)


def _added(model: Any, out: Tensor) -> None:
    model.number += len(out)


def _from_a_table(model: Any, out: Tensor) -> None:
    model.kept = TABLE[len(out)]


def _ones_from_a_table(model: Any, out: Tensor) -> None:
    model.kept = ONES[len(out)]


def _pair_from_a_table(model: Any, out: Tensor) -> None:
    model.kept = PAIRS[len(out)]


def _not_a_number(model: Any, out: Tensor) -> None:
    model.sums.copy_(out.detach().sum(0))
    model.sums[0] = torch.nan


def _counter(model: Any, out: Tensor) -> None:
    model.kept = Counter(out.detach()[:, 0].gt(0).tolist())


TABLE, ONES = [100.0 * n for n in range(10)], [torch.ones(n) for n in range(10)]
PAIRS = [(float(n), 2.0 * n) for n in range(10)]
NOT_COMPOSED = (_pair_from_a_table, _counter)
"""May be refused: their parts do not always tell what the whole batch leaves."""
KEEPS = (
    _rows, _pair, _entries, _items, _samples, _many, _total, _in_place, _through_data, _in_an_array, _mean,
    _added, _from_a_table, _ones_from_a_table, _not_a_number, *NOT_COMPOSED,
)  # fmt: skip
RARE: dict[str, list[Any]] = {
    "all, all, none": [EACH, EACH, (), EACH, ()],
    "all, until none": [EACH, EACH, EACH, EACH, EACH, (), ()],
    "none, all, none": [(), (), EACH, (), EACH, ()],
    "some, none": [(0, 3, 6), (), (1, 4, 7), ()],
    "short batches": [EACH, EACH, (0, 1, 2), EACH, (), (0, 1, 2), ()],
}


class Keeping(nn.Module):
    """Keeps something of a batch `when` it says so."""

    def __init__(self, keep: Any, when: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.net, self.keep, self.when = mlp(), keep, when
        self.kept, self.calls, self.array = None, 0, torch.zeros(4, dtype=torch.float64).numpy()
        self.register_buffer("number", torch.zeros((), dtype=torch.long))
        self.register_buffer("sums", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("edges", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.calls += 1
        if self.when(self, x):
            self.keep(self, out)
        return out


def _state(model: Any) -> Any:
    return [model.kept, model.number, model.array, model.calls, model.sums]


def _batches(rare: list[Any], short: bool) -> list[Tensor]:
    made = []
    for i, some in enumerate(rare):
        x = points(3 if short and len(some) == 3 else BATCH, seed=i)[0]
        x[:, 0] = 0
        x[list(some), 0] = 1
        made.append(x)
    return made


def _check(model: Keeping, batches: list[Tensor], mode: str) -> None:
    wanted = trained(copy.deepcopy(model), batches, mode, _state, wrapped=False)
    try:
        found = trained(model, batches, mode, _state, wrapped=True)
    except memfit.Refused:
        assert model.keep in NOT_COMPOSED
        return
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rare", RARE)
@pytest.mark.parametrize("keep", KEEPS)
def test_state_stays_where_no_sample_replaces_it(keep: Any, rare: str, mode: str) -> None:
    if keep is _through_data and rare == "short batches":
        pytest.skip("writes of equal values through .data: docs/guarantees.md")
    model = Keeping(keep, lambda model, x: bool((x[:, 0] == 1).any()))
    _check(model, _batches(RARE[rare], rare == "short batches"), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("keep", KEEPS)
def test_state_stays_where_a_counter_does_not_replace_it(keep: Any, every: int, mode: str) -> None:
    _check(Keeping(keep, lambda model, x: model.calls % every == 1), _batches([EACH] * 7, False), mode)


def _positions(model: Any, rare: Tensor, x: Tensor) -> None:
    model.kept = rare.nonzero().flatten().tolist()


def _values(model: Any, rare: Tensor, x: Tensor) -> None:
    model.kept = x[:, 1][rare].tolist()


def _tensor(model: Any, rare: Tensor, x: Tensor) -> None:
    model.kept = x[:, 1][rare]


def _places(model: Any, rare: Tensor, x: Tensor) -> None:
    model.kept = rare.nonzero().flatten()


class Choosing(nn.Module):
    """Keeps what it finds of rare samples in each batch."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.net, self.choose, self.kept = mlp(), choose, None

    def forward(self, x: Tensor) -> Tensor:
        self.choose(self, x[:, 0] == 1, x)
        return self.net(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rare", [[(0,), (4,), (8,)], [(), (4, 5), ()], [(1, 7), (), (2, 6), (4,)], [(), EACH, (5,)]])
@pytest.mark.parametrize("choose", [_positions, _values, _tensor, _places])
def test_what_is_kept_of_rare_samples(choose: Any, rare: list[Any], mode: str) -> None:
    model, batches = Choosing(choose), _batches(rare, False)
    wanted = trained(copy.deepcopy(model), batches, mode, lambda model: model.kept, wrapped=False)
    try:
        found = trained(model, batches, mode, lambda model: model.kept, wrapped=True)
    except memfit.Refused:
        return
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
