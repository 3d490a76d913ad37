"""Forwards that move state if a batch holds a rare sample. Each batch moves it as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import Forwards, mlp, points
from stateful import MODES, trained
from torch import Tensor, nn
from torch.optim import SGD

import memfit

EXACT, BATCH = 1e-12, 8
LOG: list[int] = []


def _added(model: Any, rare: Tensor) -> None:
    model.seen.add_(1)


def _replaced(model: Any, rare: Tensor) -> None:
    model.seen = model.seen + 1


def _averaged(model: Any, rare: Tensor) -> None:
    model.seen.mul_(0.5).add_(0.5)


def _hits(model: Any, rare: Tensor) -> None:
    model.hits.add_(rare.sum())


def _counted(model: Any, rare: Tensor) -> None:
    model.count += 1


def _listed(model: Any, rare: Tensor) -> None:
    model.items.append(1)


def _logged(model: Any, rare: Tensor) -> None:
    LOG.append(1)


def _sized(model: Any, rare: Tensor) -> None:
    model.count += rare.shape[0]


def _entered(model: Any, rare: Tensor) -> None:
    model.table["count"] += 1


def _flagged(model: Any, rare: Tensor) -> None:
    model.count = 1


MOVES = (_added, _replaced, _averaged, _hits, _counted, _sized, _listed, _logged, _entered, _flagged)
READS: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda rare: bool(rare.any()),
    "tolist": lambda rare: True in rare.tolist(),
    "len": lambda rare: len(rare.nonzero()) > 0,
    "count": lambda rare: int(rare.sum()),
}
RARE: dict[str, list[Any]] = {
    "one late in its batch": [(5,), (5,), (0, 4, 7), (6,)],
    "one, then none": [(6,), (), (0, 4, 7), (6,)],
    "two in one piece": [(5, 6), (), (0, 4, 7), (6,)],
    "none, then all": [(), range(8), (0, 4, 7), ()],
    "the last": [(7,), (0, 7), (), (2, 3)],
    "some": [(2, 3, 5), (0,), range(8), (0, 7)],
}
"""Rare samples of each batch."""
WORDS = ("at every call", "branches on", "mixes samples", "not the same in all")


class Moving(nn.Module):
    """A net that moves state if there is a rare sample, and scales its output by what it has moved."""

    def __init__(self, move: Any, read: str, scale: float = 0.1) -> None:
        super().__init__()
        self.net, self.move, self.read, self.scale = mlp(), move, READS[read], scale
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("hits", torch.zeros((), dtype=torch.float64))
        self.count, self.items, self.table = 0, list[int](), {"count": 0}

    @property
    def moved(self) -> Tensor:
        """All that it moves but `hits`."""
        return self.seen + self.count + len(self.items) + len(LOG) + self.table["count"]

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] == 1
        out = self.net(x) * (1 + self.scale * self.moved) if self.scale else self.net(x)
        if self.read(rare):
            self.move(self, rare)
        return out


def _batches(rare: list[Any]) -> Sequence[Tensor]:
    """Batches with these rare samples."""
    x = points(BATCH * len(rare))[0]
    x[:, 0] = 0
    x[[i * BATCH + each for i, some in enumerate(rare) for each in some], 0] = 1
    return x.split(BATCH)


def _to_targets(out: Tensor, x: Tensor) -> Tensor:
    return (out - x[:, 3:]).pow(2).mean()


def _state(model: Any) -> list[Tensor]:
    return [model.moved.detach(), model.hits]


def _trained(model: Moving, rare: list[Any], mode: str, wrapped: bool) -> Any:
    """The state after a step on each batch, and the parameters."""
    LOG.clear()
    return trained(model, _batches(rare), mode, _state, wrapped=wrapped, loss=_to_targets)


def _is_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rare", RARE)
@pytest.mark.parametrize("move", MOVES)
def test_state_that_rare_samples_move(move: Any, rare: str, mode: str) -> None:
    read = list(READS)[(MOVES.index(move) + list(RARE).index(rare)) % len(READS)]
    model = Moving(move, read)
    wanted = _trained(copy.deepcopy(model), RARE[rare], mode, wrapped=False)
    try:
        found = _trained(model, RARE[rare], mode, wrapped=True)
    except memfit.Refused as refused:
        assert any(said in str(refused) for said in WORDS)
        # The whole adds its 8 samples and parts add those of some: truly no sum.
        assert move is _sized or mode == "loss" or rare not in ("one late in its batch", "one, then none", "two in one piece")
        return
    _is_close(found, wanted)


class Caching(nn.Module):
    """A net that makes a table of this many numbers when a batch first has a rare sample."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.net, self.table, self.numbers = mlp(), None, numbers

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        if bool((x[:, 0] == 1).any()):
            if self.table is None:
                self.table = torch.linspace(0, 1, self.numbers, dtype=x.dtype)
            out = out + (x[:, :1] == 1) * self.table[:4]
        return out


@pytest.mark.parametrize("numbers", [4, 8192])
@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_is_made_when_it_is_first_needed_stays_cut(mode: str, numbers: int) -> None:
    model, batches = Caching(numbers), _batches([(), range(8), (0, 4, 7), ()])
    plain = copy.deepcopy(model)
    forwards = Forwards(model.net[0])  # type: ignore[index]
    _is_close(*(trained(each, batches, mode, lambda model: model.table, wrapped=each is model) for each in (model, plain)))
    assert max(forwards.sizes) == 3


@pytest.mark.parametrize("mode", ["loss", "accumulated"])
def test_a_large_tensor_that_is_written_on_some_batches_is_refused_by_name(mode: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("memfit.engine.unseen_moves.LARGE", 4)
    with pytest.raises(memfit.Refused, match="DoubleTensor"):
        _trained(Moving(_hits, "any"), [(), (), (), (1, 4, 7)], mode, wrapped=True)


@pytest.mark.parametrize("rare", [(7,), (0,), (0, 2), (0, 3, 7)])
@pytest.mark.parametrize("move", [_counted, _sized, _listed, _entered, _added, _replaced, _flagged])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", ["any", "count"])
@pytest.mark.parametrize("others", [(), range(BATCH)])
def test_state_that_is_moved_without_a_call_of_torch(
    others: Any, read: str, move: Any, rare: tuple[int, ...], mode: str
) -> None:
    model, batches = Moving(move, read, scale=0), [others, others, rare, others]
    wanted = _trained(copy.deepcopy(model), batches, mode, wrapped=False)
    try:
        found = _trained(model, batches, mode, wrapped=True)
    except memfit.Refused as refused:
        assert any(said in str(refused) for said in WORDS)
        return
    _is_close(found, wanted)


class Classes(nn.Module):
    """Counts samples by class, and where it is in a ring of as many places as a batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table, self.place = mlp(), dict[int, int](), 0

    def forward(self, x: Tensor) -> Tensor:
        for each in x[:, 0].tolist():
            self.table[int(each)] = self.table.get(int(each), 0) + 1
        self.place = (self.place + len(x)) % BATCH
        return self.net(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("classes", [2, 5, 6, 8])
def test_more_places_than_a_proof_has_samples(classes: int, mode: str) -> None:
    model, x = Classes(), points(3 * BATCH)[0]
    x[:, 0] = torch.arange(3 * BATCH) % classes
    both = (copy.deepcopy(model), model)
    _is_close(*(trained(each, x.split(BATCH), mode, _of_classes, wrapped=each is model) for each in both))


def _of_classes(model: Any) -> Any:
    return model.table, model.place


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("read", ["any", "count"])
def test_two_calls_with_losses_of_their_own(read: str, move: Any) -> None:
    def ran(model: Moving, wrapped: bool) -> Any:
        LOG.clear()
        optimizer = SGD(model.parameters(), 0.1)
        if wrapped:
            memfit.wrap(model, optimizer, micro_batch=3)
        for batch in _batches([(), (5,), (0, 4, 7), (), (1,)]):
            optimizer.zero_grad()
            one, other = model(batch), model(batch + 0.0)
            one.pow(2).mean().backward()
            other.abs().mean().backward()
            optimizer.step()
        return _state(model), {name: parameter.detach() for name, parameter in model.named_parameters()}

    model = Moving(move, read, scale=0)
    wanted = ran(copy.deepcopy(model), wrapped=False)
    try:
        found = ran(model, wrapped=True)
    except memfit.Refused as refused:
        assert any(said in str(refused) for said in WORDS)
        return
    _is_close(found, wanted)
