"""Forwards and losses that read values of the batch and branch on them, where only a later batch shows it."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, mlp, points
from processes import Processes
from stepping import Seen
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import Gradients, gradients_of, relative_error

import memfit

EXACT, STEPS, BATCH = 1e-12, 4, 8
TARGETS = points(BATCH * STEPS, seed=3)[0][:, :4]


def _samples(before: int, marked: int) -> Tensor:
    """Batches in which all samples have the mark `before`, then one with `marked` marked samples, in the first number."""
    x = points(BATCH * STEPS)[0]
    x[:, 0] = before
    x[(STEPS - 2) * BATCH : (STEPS - 2) * BATCH + marked, 0] = 1
    x[(STEPS - 2) * BATCH + marked : (STEPS - 1) * BATCH, 0] = 0
    return x


CONDITIONS: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda marked: marked.any(),
    "torch.any": lambda marked: torch.any(marked, 0),
    "not any other": lambda marked: not (~marked).any(),
    "all": lambda marked: marked.all(),
    "a sum": lambda marked: marked.sum() == 0,
    "an int": lambda marked: int(marked.sum()) > 0,
    "item": lambda marked: marked.sum().item(),
    "int of any": lambda marked: int(marked.any()),
    "an index": lambda marked: [False, True][marked.any()],
    "tolist": lambda marked: True in marked.tolist(),
    "len of nonzero": lambda marked: len(marked.nonzero()),
    "a size": lambda marked: marked[marked].numel(),
    "numpy": lambda marked: np.any(marked.numpy()),
    "a loop": lambda marked: any(bool(each) for each in marked),
    "equal": lambda marked: torch.equal(marked, torch.ones_like(marked)),
    "contains": lambda marked: 1 in marked.long(),
    "unique": lambda marked: len(marked.unique()) == 1,
    "the largest": lambda marked: marked.long().max() == 1,
    "the smallest as int": lambda marked: int(marked.long().min()) == 1,
    "more than six": lambda marked: int(marked.sum()) > 6,
    "four or more as item": lambda marked: marked.count_nonzero().item() >= 4,
}
WAYS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a branch": lambda value, held: value * 0.9 if held else value,
    "two branches": lambda value, held: value * 0.9 if held else value * 0.7,
    "a number": lambda value, held: value * (0.9 if held else 0.7),
    "an integer": lambda value, held: value * (2 if held else 1),
    "a list": lambda value, held: value * torch.tensor([1.0, 0.9 if held else 1.0]).sum(),
    "an only value": lambda value, held: value * torch.tensor(2 if held else 1),
    "a function": lambda value, held: torch.sin(value) if held else torch.tanh(value),
    "a word": lambda value, held: torch.clamp(value, max=0.1 if held else 0.2),
}
PAIRS = [(each, "a branch") for each in CONDITIONS] + [("any", each) for each in WAYS if each != "a branch"]
MARKED = ((1, 1), (1, 0), (1, BATCH - 1), (0, 1), (0, BATCH - 1))
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a known mean": F.mse_loss,
    "an own mean": lambda out, targets: (out - targets).pow(2).mean(),
    "a sum": lambda out, targets: (out - targets).abs().sum(),
    "two terms": lambda out, targets: F.mse_loss(out, targets) + 0.1 * out.pow(4).mean(),
    "classes": lambda out, targets: F.cross_entropy(out, targets.argmax(1)),
}


class Branching(nn.Module):
    """A net whose outputs depend on a condition of the batch."""

    def __init__(self, condition: Any, way: Any) -> None:
        super().__init__()
        self.net, self.condition, self.way = mlp(), condition, way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.net(x), self.condition(x[:, 0] == 1))


class Guarded(nn.Module):
    """A net whose outputs are computed otherwise where a mask leaves nothing, with equal results."""

    def __init__(self, guard: Any) -> None:
        super().__init__()
        self.net, self.guard = mlp(), guard

    def forward(self, x: Tensor) -> Tensor:
        return self.guard(self.net(x), x[:, 0] == 1)


def _parameters_after(
    step: Callable[[Tensor, Tensor], object], model: nn.Module, x: Tensor, targets: Tensor = TARGETS
) -> dict[str, Tensor]:
    for start in range(0, len(x), BATCH):
        step(x[start : start + BATCH], targets[start : start + BATCH])
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def _in_plain(
    model: nn.Module, loss_fn: Any, x: Tensor, targets: Tensor = TARGETS, rate: float = 0.1
) -> dict[str, Tensor]:
    optimizer = SGD(model.parameters(), rate)

    def step(some: Tensor, wanted: Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(model, (some, wanted)).backward()
        optimizer.step()

    return _parameters_after(step, model, x, targets)


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize(("condition", "way"), PAIRS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_branches_on_a_later_batch(condition: str, way: str, marked: tuple[int, int], loss: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, targets = batch
        return WAYS[way](LOSSES[loss](model(x), targets), CONDITIONS[condition](x[:, 0] == 1))

    model, x = mlp(), _samples(*marked)
    wanted = _in_plain(copy.deepcopy(model), loss_fn, x)
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3, loss_fn=loss_fn)
    assert relative_error(_parameters_after(lambda some, targets: run.step((some, targets)), model, x), wanted) < EXACT


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize(("condition", "way"), PAIRS)
@pytest.mark.parametrize("through", ["accumulated", "replayed"])
def test_a_forward_that_branches_on_a_later_batch(condition: str, way: str, marked: tuple[int, int], through: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.mse_loss(out if through == "accumulated" else out.flip(0).flip(0), batch[1])

    model, x = Branching(CONDITIONS[condition], WAYS[way]), _samples(*marked)
    wanted = _in_plain(copy.deepcopy(model), loss_fn, x)
    optimizer = SGD(model.parameters(), 0.1)
    memfit.wrap(model, optimizer, micro_batch=3)

    def step(some: Tensor, targets: Tensor) -> None:
        loss_fn(model, (some, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        found = _parameters_after(step, model, x)
    except memfit.Refused as refused:
        assert "branches on values of the batch" in str(refused) or "mixes samples" in str(refused)
    else:
        assert relative_error(found, wanted) < EXACT


GUARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a masked term": lambda value, marked: value + (value * marked[:, None]).pow(2) if marked.any() else value,
    "all of them": lambda value, marked: value * marked[:, None] if not marked.all() else value,
    "rows of a mask": lambda value, marked: (
        value.index_put((marked,), value[marked].tanh()) if len(marked.nonzero()) else value
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("mode", ["loss", "accumulated", "replayed"])
def test_a_guard_that_changes_nothing_stays_cut(guard: str, mode: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        out = out.flip(0).flip(0) if mode == "replayed" else out
        out = GUARDS[guard](out, batch[0][:, 0] == 1) if mode == "loss" else out
        return (out - batch[1]).pow(2).sum() if mode == "loss" else F.mse_loss(out, batch[1])

    x = torch.cat([_samples(1, 1), _samples(0, BATCH - 1)])
    targets = torch.cat([TARGETS, TARGETS])
    model = mlp() if mode == "loss" else Guarded(GUARDS[guard])
    wanted = _in_plain(copy.deepcopy(model), loss_fn, x, targets, 0.01)
    forwards = Forwards(next(each for each in model.modules() if type(each) is nn.Linear))
    optimizer = SGD(model.parameters(), 0.01)
    run = memfit.wrap(model, optimizer, micro_batch=3, loss_fn=loss_fn if mode == "loss" else None)

    def step(some: Tensor, targets: Tensor) -> None:
        if mode == "loss":
            run.step((some, targets))
            return
        loss_fn(model, (some, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert relative_error(_parameters_after(step, model, x, targets), wanted) < EXACT
    assert max(forwards.sizes) == 3
    assert len(forwards.sizes) <= (3 if mode != "replayed" else 6) * 2 * STEPS + 12


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def _in_a_forward_on_one_of_two(read: bool) -> list[Gradients]:
    """The gradients of three steps in script mode, where micro-batches of the first process alone take a guard."""
    model, found = Guarded(GUARDS["a masked term"]), list[Gradients]()
    optimizer = SGD(model.parameters(), 0.0)
    memfit.wrap(model, optimizer, micro_batch=3)
    for step in (0, 1, 1):
        out = model(_shares(step)[int(os.environ["RANK"])])
        (out.flip(0) if read else out).pow(2).mean().backward()
        optimizer.step()
        found.append(gradients_of(model))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("read", [False, True])
def test_a_guard_in_a_forward_of_one_process_stays_cut(read: bool, two: Processes) -> None:
    model = Guarded(GUARDS["a masked term"])
    for share in _shares(1):
        (model(share).pow(2).mean() / 2).backward()
    for found in two.run(_in_a_forward_on_one_of_two, read):
        assert all(relative_error(each, gradients_of(model)) < EXACT for each in found[1:])


def _on_one_of_two(guarded: bool) -> Gradients:
    """The gradients of a second step in step mode, where micro-batches of the first process alone branch."""
    model = mlp()
    seen = Seen(model)
    loss_fn = _guarded if guarded else _branching
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=3, loss_fn=loss_fn, before_step=seen)
    for step in range(2):
        run.step(_shares(step)[int(os.environ["RANK"])])
    return seen.gradients[-1]


def _shares(step: int) -> tuple[Tensor, Tensor]:
    one, other = points(BATCH)[0], points(BATCH, seed=1)[0]
    one[:, 0], other[:, 0] = 1, 1
    one[step:, 0] = 1 - step
    return one, other


def _branching(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).pow(2).mean()
    return loss * 0.9 if (x[:, 0] == 1).any() else loss


def _guarded(model: nn.Module, x: Tensor) -> Tensor:
    out, marked = model(x), x[:, 0] == 1
    return ((out + out.tanh() * marked[:, None]) if marked.any() else out).pow(2).mean()


@pytest.mark.parametrize("guarded", [False, True])
def test_a_branch_of_one_process_is_that_of_ddp(guarded: bool, two: Processes) -> None:
    model = mlp()
    for share in _shares(1):
        ((_guarded if guarded else _branching)(model, share) / 2).backward()
    for found in two.run(_on_one_of_two, guarded):
        assert relative_error(found, gradients_of(model)) < EXACT


def _layer_drop(x: Tensor, net: nn.Module) -> Tensor:
    out = net(x)
    if not bool(torch.isfinite(out).all()):
        raise ValueError("not finite")
    return out * 2 if random.random() < 0.5 else out


def _random_scale(x: Tensor, net: nn.Module) -> Tensor:
    scale = float(np.random.uniform(0.5, 1.0))
    assert len(x[:, 0].tolist()) == len(x)
    return net(x) * scale


class Drawing(nn.Module):
    """A net whose outputs are computed in one of two ways by chance, and which reads its input."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.net, self.way = mlp(), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x, self.net)


@pytest.mark.parametrize("way", [_layer_drop, _random_scale])
@pytest.mark.parametrize("mode", ["loss", "forward"])
def test_what_is_drawn_for_each_micro_batch_stays_cut(way: Any, mode: str) -> None:
    model, x = mlp() if mode == "loss" else Drawing(way), torch.cat([_samples(1, BATCH)] * 3)
    forwards = Forwards(next(each for each in model.modules() if type(each) is nn.Linear))
    loss_fn = (lambda model, batch: way(batch, model).pow(2).mean()) if mode == "loss" else None
    optimizer = SGD(model.parameters(), 0.01)
    run = memfit.wrap(model, optimizer, micro_batch=3, loss_fn=loss_fn)
    for start in range(0, len(x), BATCH):
        if mode == "loss":
            run.step(x[start : start + BATCH])
            continue
        model(x[start : start + BATCH]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert max(forwards.sizes) == 3
    assert len(forwards.sizes) <= 3 * (len(x) // BATCH) + 6


class Logging(nn.Module):
    """A model that computes its loss, checks it and writes it into a list of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        if torch.isfinite(loss):
            WRITTEN.append(loss.item())
        return loss


WRITTEN: list[float] = []


def test_a_known_loss_that_a_forward_computes_and_reads_branches_nowhere() -> None:
    model, x, y = Logging(), points(BATCH)[0], points(BATCH)[1]
    plain = copy.deepcopy(model)
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=3)
    for each in (model, plain):
        for _ in range(3):
            each.zero_grad()
            each(x, y).backward()
    assert relative_error(gradients_of(model), gradients_of(plain)) < EXACT


class GuardedLoss(nn.Module):
    """A model that computes its loss, with more weight on marked samples if there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses, marked = F.cross_entropy(self.net(x), y, reduction="none"), x[:, 0] == 1
        if 1 in x[:, 0].tolist():
            losses = torch.where(marked, losses * 5, losses)
        return losses.mean()


def test_a_guard_in_a_models_own_loss_stays_cut() -> None:
    model, x, y = GuardedLoss(), _samples(0, 1), points(BATCH * STEPS)[1]
    plain = copy.deepcopy(model)
    forwards = Forwards(model.net[0])  # type: ignore[index]
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=3)
    for start in range(0, len(x), BATCH):
        for each in (model, plain):
            each.zero_grad()
            each(x[start : start + BATCH], y[start : start + BATCH]).backward()
        assert relative_error(gradients_of(model), gradients_of(plain)) < EXACT
    assert max(forwards.sizes) == 3


OTHERS: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "a loss function": lambda out, targets, held: (F.l1_loss if held else F.mse_loss)(out, targets),
    "a limit": lambda out, targets, held: (out.clamp(min=0 if held else -1) - targets).pow(2).mean(),
    "a weight in a loop": lambda out, targets, held: sum(
        (2.0 if held else 1.0) * out[targets.argmax(1) == c].pow(2).sum() for c in range(4)
    ),  # type: ignore[return-value]
    "a text": lambda out, targets, held: out.pow(2).mean() * (2.0 if held else 1.0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_ways_to_branch_on_a_later_batch(other: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        held = "1." in str(batch[0][:, 0]) if other == "a text" else 1 in batch[0][:, 0].tolist()
        return OTHERS[other](model(batch[0]), batch[1], held)

    model, x = mlp(), _samples(0, 1)
    wanted = _in_plain(copy.deepcopy(model), loss_fn, x)
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3, loss_fn=loss_fn)
    assert relative_error(_parameters_after(lambda some, targets: run.step((some, targets)), model, x), wanted) < EXACT


def _until_it_is_small(x: Tensor, net: nn.Module) -> Tensor:
    out = net(x)
    while out.abs().max().item() > 0.1:
        out = out * 0.5
    return out


def _while_some_are_active(x: Tensor, net: nn.Module) -> Tensor:
    out = net(x)
    while int((out.detach().abs() > 0.1).sum()) > 0:
        out = torch.where(out.detach().abs() > 0.1, out * 0.5, out)
    return out


def _until_some_are_kept(x: Tensor, net: nn.Module) -> Tensor:
    kept = torch.rand(len(x), 1, dtype=x.dtype) < 0.5
    while not kept.any():
        kept = torch.rand(len(x), 1, dtype=x.dtype) < 0.5
    return net(x) * 2


@pytest.mark.parametrize("way", [_until_it_is_small, _while_some_are_active, _until_some_are_kept])
@pytest.mark.parametrize("mode", ["loss", "forward"])
def test_loops_that_run_until_they_read_something_else_end(way: Any, mode: str) -> None:
    model, x = mlp() if mode == "loss" else Drawing(way), _samples(1, BATCH)
    plain = copy.deepcopy(model)
    if mode == "loss":
        run = memfit.wrap(
            model, SGD(model.parameters(), 0.0), micro_batch=3, loss_fn=lambda model, x: way(x, model).pow(2).mean()
        )
        run.step(x[:BATCH])
        return
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=3)
    try:
        model(x[:BATCH]).pow(2).mean().backward()
    except memfit.Refused:
        assert way is not _until_some_are_kept
        return
    plain(x[:BATCH]).pow(2).mean().backward()
    assert relative_error(gradients_of(model), gradients_of(plain)) < EXACT


THRESHOLDS: dict[str, Callable[[Tensor], Any]] = {
    "a sum": lambda marked: marked.sum() > 4,
    "an int": lambda marked: int(marked.sum()) > 4,
    "item": lambda marked: marked.sum().item() >= 5,
    "count_nonzero": lambda marked: marked.count_nonzero().item() > 4,
    "not fewer": lambda marked: not int(marked.sum()) < 5,
    "of numbers": lambda marked: int(marked.double().sum()) > 4,
    "len of nonzero": lambda marked: len(marked.nonzero()) > 4,
    "a size": lambda marked: marked[marked].numel() > 4,
    "a shape": lambda marked: marked.nonzero().shape[0] >= 5,
    "size of": lambda marked: marked.nonzero().size(0) > 4,
}


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("marked", [4, 5, 8])
@pytest.mark.parametrize("mode", ["loss", "forward"])
def test_a_count_that_only_a_whole_batch_has(threshold: str, marked: int, mode: str) -> None:
    """Its first batches have exactly as many as change nothing, and micro-batches never have more."""
    condition = THRESHOLDS[threshold]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, targets = batch
        value = F.mse_loss(model(x), targets)
        return value * 0.9 if mode == "loss" and condition(x[:, 0] == 1) else value

    x = points(BATCH * STEPS)[0]
    x[:, 0] = 0
    for start in range(0, len(x), BATCH):
        x[start : start + (4 if start < BATCH else marked), 0] = 1
    model = Branching(condition, WAYS["a branch"]) if mode == "forward" else mlp()
    wanted = _in_plain(copy.deepcopy(model), loss_fn, x)
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3, loss_fn=loss_fn)
    try:
        found = _parameters_after(lambda some, targets: run.step((some, targets)), model, x)
    except memfit.Refused as refused:
        assert "branches on values" in str(refused) or "mixes samples" in str(refused)
        return
    assert relative_error(found, wanted) < EXACT


class CountsMarked(nn.Module):
    """Its scale grows with the batches that have a marked sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x) * (1 + 0.1 * self.seen)
        if bool((x[:, 0] == 1).any()):
            with torch.no_grad():
                self.seen.add_(1)
        return out


@pytest.mark.parametrize("marked", [(0, 1), (0, 4, 7), (2, 3, 5), range(8)])
@pytest.mark.parametrize("mode", ["loss", "forward"])
def test_state_that_some_batches_move_is_moved_once(marked: Any, mode: str) -> None:
    """Later proofs may be made on samples that move nothing."""
    x = points(BATCH * 8)[0]
    x[:, 0] = 0
    for start in range(0, len(x), BATCH):
        x[[start + i for i in (marked if start in (0, 3 * BATCH, 6 * BATCH) else ())], 0] = 1
    targets = points(len(x), seed=3)[0][:, :4]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).pow(2).mean()

    model = CountsMarked()
    plain = copy.deepcopy(model)
    wanted = _in_plain(plain, loss_fn, x, targets)
    optimizer = SGD(model.parameters(), 0.1)
    run = memfit.wrap(model, optimizer, micro_batch=3, loss_fn=loss_fn if mode == "loss" else None)

    def step(some: Tensor, wanted: Tensor) -> None:
        if mode == "loss":
            run.step((some, wanted))
            return
        optimizer.zero_grad()
        loss_fn(model, (some, wanted)).backward()
        optimizer.step()

    try:
        found = _parameters_after(step, model, x, targets)
    except memfit.Refused as refused:
        assert any(said in str(refused) for said in ("at every call", "branches on", "mixes samples"))
        return
    assert relative_error(found, wanted) < EXACT
    assert torch.equal(model.seen, plain.seen)


@pytest.mark.parametrize("hidden", [0, 2, 4])
def test_padding_that_is_cut_off_stays_in_one_pass(hidden: int) -> None:
    """The first labels of each row are of the prompt and count nothing."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        words, mask = batch
        longest = int(mask.sum(1).max())
        words, mask = words[:, :longest], mask[:, :longest]
        labels = words.masked_fill(~mask, -100).index_fill(1, torch.arange(hidden), -100)
        return F.cross_entropy(model(words).transpose(1, 2), labels, ignore_index=-100)

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 4, (BATCH, 16), generator=generator)
    mask = torch.arange(16) < torch.randint(8, 13, (BATCH, 1), generator=generator)
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 4)).double()
    plain = copy.deepcopy(model)
    loss_fn(plain, (words, mask)).backward()
    optimizer, seen = SGD(model.parameters(), 0.1), Seen(model)
    run = memfit.wrap(model, optimizer, micro_batch=3, loss_fn=loss_fn, before_step=seen)
    run.step((words, mask))
    assert relative_error(seen.gradients[0], gradients_of(plain)) < EXACT
    assert not any("all samples together" in event.message for event in run.events)
