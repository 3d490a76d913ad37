"""Forwards and losses that do something else with many samples than with few, over two processes: each has what
DistributedDataParallel computes of its share, and that it is not one process's is said."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from processes import Processes
from stepping import LossFn, Seen
from test_by_size import FORWARDS, LOSSES, MOST, Doing, each
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import Gradients, gradients_of, relative_error

import memfit
from memfit import MemfitError

X, Y = points(24)
EXACT = 1e-12
Found = tuple[Gradients, list[str]]
UNEVEN = ((9, 3), (3, 9))
LEFT_OUT = ("a limit", "its number in a tensor with a limit", "another module of its type", "another parameter")
"""Forwards that do something else with six samples than with few, or leave parameters without a gradient."""


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def share(sizes: tuple[int, int], rank: int) -> tuple[Tensor, Tensor]:
    first = sum(sizes[:rank])
    return X[first : first + sizes[rank]], Y[first : first + sizes[rank]]


def normalising() -> nn.Module:
    net = mlp()
    return nn.Sequential(nn.BatchNorm1d(net[0].in_features).double(), *net)


def model_of(kind: str) -> nn.Module:
    return normalising() if kind == "batch norm" else mlp()


def stepped(how: str, kind: str, sizes: tuple[int, int]) -> tuple[Gradients, list[str], int]:
    """The gradients of a second step on this process, what was said, and batches that batch norm counted in both."""
    model, seen = model_of(kind), None
    seen = Seen(model)
    optimizer = SGD(model.parameters(), 0.0)
    run = memfit.wrap(model, optimizer, loss_fn=LOSSES[how], micro_batch=4, before_step=seen)
    for _ in range(2):
        run.step(share(sizes, int(os.environ["RANK"])))
    counted = int(model[0].num_batches_tracked) if kind == "batch norm" else 2
    return seen.gradients[-1], [event.message for event in run.events], counted


def scripted(how: str, sizes: tuple[int, int]) -> Found | str:
    """The gradients of a backward and what was said, or how memfit refuses."""
    model = Doing(FORWARDS[how], how)
    run = memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=4)
    x, y = share(sizes, int(os.environ["RANK"]))
    try:
        F.cross_entropy(model(x), y).backward()
    except MemfitError as error:
        return str(error)
    return gradients_of(model), [event.message for event in run.events]


class FillsAtFirst(nn.Module):
    """A forward that moves a dictionary, of which one sample shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.parts = mlp(), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return h * self.parts.setdefault(h.shape[-1], torch.linspace(0.5, 1.5, h.shape[-1]).double())


def of_two_calls(sizes: tuple[int, int]) -> list[Gradients] | str:
    """The gradients of two steps with one loss of two calls, or how memfit refuses."""
    model, found = FillsAtFirst(), []
    memfit.wrap(model, SGD(model.parameters(), 0.0), micro_batch=3)
    x, _ = share(sizes, int(os.environ["RANK"]))
    for _ in range(2):
        model.zero_grad()
        try:
            F.mse_loss(model(x), model(x + 0.5)).backward()
        except MemfitError as error:
            return str(error)
        found.append(gradients_of(model))
    return found


def plain(model: nn.Module, loss_fn: LossFn, sizes: tuple[int, int], weights: Sequence[float] = ()) -> Gradients:
    """What DistributedDataParallel computes, weighted by samples, or by other weights. (A gradient that the loss rounds is not
    scaled before.)"""
    weights, summed = weights or sizes, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for rank, weight in enumerate(weights):
        model.zero_grad()
        loss_fn(model, share(sizes, rank)).backward()
        for name, gradient in gradients_of(model).items():
            assert gradient is not None
            summed[name] += gradient * (weight / sum(weights))
    return {**summed}


def divided(model: nn.Module, sizes: tuple[int, int]) -> Gradients:
    """A sum over samples by a divisor of the batch: memfit follows both, and adds up both over processes."""
    shares = [share(sizes, rank) for rank in range(2)]
    (sum(each(model, of_one).sum() for of_one in shares) / sum(min(size, MOST) for size in sizes)).backward()
    return gradients_of(model)


@pytest.mark.parametrize("sizes", [*UNEVEN, (6, 6)])
@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_fn_is_computed_of_each_share(two: Processes, how: str, sizes: tuple[int, int]) -> None:
    (found, said, _), (other, its, _) = two.run(stepped, how, "mlp", sizes)
    # A mean over entries is over those of all processes: of 3 classes in a large share, and of 4 in a small one.
    entries = [size * (3 if size > MOST else 4) for size in sizes] if how == "classes" else sizes
    want = divided(mlp(), sizes) if how == "a divisor with a limit" else plain(mlp(), LOSSES[how], sizes, entries)
    assert relative_error(found, want) <= EXACT
    assert relative_error(other, found) == 0
    for messages in (said, its):
        assert any("computes it on its own share" in message for message in messages)


@pytest.mark.parametrize("sizes", UNEVEN)
def test_a_share_that_runs_again_as_another_does_moves_state_once(two: Processes, sizes: tuple[int, int]) -> None:
    for _, _, counted in two.run(stepped, "a factor", "batch norm", sizes):
        assert counted == sum(2 if size <= 4 else 6 for size in sizes[:1])  # of rank 0: batches of two steps


@pytest.mark.parametrize("how", [how for how in FORWARDS if how not in LEFT_OUT])
def test_a_forward_that_only_the_whole_would_change_is_said(two: Processes, how: str) -> None:
    want = plain(Doing(FORWARDS[how], how), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (6, 6))
    for found, said in two.run(scripted, how, (6, 6)):
        assert relative_error(found, want) <= EXACT
        assert any("computes it on its own share" in message for message in said)


@pytest.mark.parametrize("sizes", UNEVEN)
def test_a_forward_that_one_share_changes_ends_all(two: Processes, sizes: tuple[int, int]) -> None:
    for error in two.run(scripted, "a factor", sizes):
        assert "the number of samples" in error


def test_calls_that_run_together_on_one_share_only_end_all(two: Processes) -> None:
    for error in two.run(of_two_calls, (1, 7)):
        assert "2, 1 of the calls together" in error
    found, other = two.run(of_two_calls, (4, 8))
    model = FillsAtFirst()
    F.mse_loss(model(X[:12]), model(X[:12] + 0.5)).backward()
    assert all(relative_error(each, gradients_of(model)) <= EXACT for each in (*found, *other))
