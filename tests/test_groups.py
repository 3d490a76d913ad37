"""Samples of one class or group that compute something together: proofs have some of one group in both parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import mlp
from torch import Tensor, nn
from torch.optim import SGD
from zoo.plain import relative_error

import memfit
from memfit import Refused
from memfit.batches.cut import Axis, Layout
from memfit.equivalence.proof_samples import pairs_of, spaced, still_apart

SAMPLES = 12
GROUPS = {
    "neighbors": torch.arange(SAMPLES) // 3,
    "halves": torch.arange(SAMPLES) % 6,
    "one pair": torch.tensor([4, 1, 7, 3, 0, 5, 11, 2, 9, 10, 6, 7]),
    "two": torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]),
}


def batch(groups: Tensor) -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(0)).double(), groups


def together(groups: Tensor) -> Tensor:
    return (groups[:, None] == groups[None]).double()


def contrastive(logits: Tensor, groups: Tensor) -> Tensor:
    pairs = together(groups) - torch.eye(len(groups)).double()
    return logits.square().mean() - (pairs * (logits @ logits.T)).sum() / len(groups)


def relative(logits: Tensor, groups: Tensor) -> Tensor:
    """The loss of groups' advantages, as in policy gradients by groups."""
    same = together(groups)
    score = logits.sum(1)
    return ((score - (same @ score) / same.sum(1)).detach() * score).mean() + logits.square().mean()


LOSSES = {"contrastive": contrastive, "relative": relative}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_samples_of_one_group_is_that_of_the_batch(loss: str, groups: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return LOSSES[loss](model(batch[0]), batch[1])

    given, model = batch(GROUPS[groups]), mlp()
    plain = copy.deepcopy(model)
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=4, loss_fn=loss_fn)
    optimizer = SGD(plain.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        want = loss_fn(plain, given)
        want.backward()
        optimizer.step()
        assert run.step(given).item() == pytest.approx(want.item(), rel=1e-12)
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= 1e-12


class Attending(nn.Module):
    """Samples attend to those of their group."""

    def __init__(self, of: Callable[[Any], Tensor] = lambda groups: groups) -> None:
        super().__init__()
        self.net, self.of = mlp(), of

    def forward(self, x: Tensor, groups: Any) -> Tensor:
        h = self.net(x)
        return (h @ h.T).masked_fill(together(self.of(groups)) == 0, -torch.inf).softmax(-1) @ h


def numbered(names: list[str]) -> Tensor:
    return torch.tensor([ord(name) for name in names])


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("named", [False, True])
def test_a_forward_over_samples_of_one_group_is_refused(groups: str, named: bool) -> None:
    x, given = batch(GROUPS[groups])
    model = Attending(numbered) if named else Attending()
    names = [chr(97 + int(group)) for group in given]
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=4)
    with pytest.raises(Refused, match="mixes samples"):
        model(x, names if named else given).square().mean().backward()


class Adding(nn.Module):
    """Adds up the samples of each group. A cut of one argument alone does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        h = self.net(x)
        return torch.zeros(SAMPLES, h.shape[1]).double().index_add(0, groups, h)[groups]


def test_what_is_said_is_why_the_likeliest_cut_is_wrong() -> None:
    model = Adding()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=4)
    with pytest.raises(Refused, match="mixes samples"):
        model(*batch(GROUPS["halves"])).square().mean().backward()


@pytest.mark.parametrize("samples", [5, 48, 49, 64, 1001])
def test_samples_to_look_at_are_of_the_batch(samples: int) -> None:
    found = spaced(samples)
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] < samples
    assert len(found) >= min(samples, 40)


class Table(nn.Module):
    """Keeps the last output of every sample, and returns it as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("table", torch.zeros(400, 4).double())

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h, before = self.net(x), self.get_buffer("table")[index]
        self.get_buffer("table")[index] = h.detach()
        return h - before


def sampled(samples: int, *, step: int, pairs: bool) -> tuple[Tensor, Tensor]:
    """A batch of samples with their numbers, of which two are one from the 7th step on."""
    draw = torch.Generator().manual_seed(step)
    x, index = torch.randn(samples, 7, generator=draw).double(), torch.randperm(400, generator=draw)[:samples]
    if pairs and step > 5:
        index[samples - samples // 3] = index[1]
    return x, index


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return model(*given).square().mean()


@pytest.mark.parametrize("samples", [12, 200])
@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("make", [Table, Attending])
def test_samples_of_one_group_that_come_later_are_looked_at_then(
    make: Callable[[], nn.Module], step_mode: bool, samples: int
) -> None:
    def trained(*, line: bool, pairs: bool) -> list[Tensor]:
        model = make()
        model.load_state_dict(state)
        optimizer = SGD(model.parameters(), 0.1)
        run = memfit.wrap(model, optimizer, micro_batch=5, loss_fn=loss_of if step_mode else None) if line else None
        for step in range(9):
            given = sampled(samples, step=step, pairs=pairs)
            if run is not None and step_mode:
                run.step(given)
                continue
            loss_of(model, given).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.state_dict().values())

    state = make().state_dict()
    for found, want in zip(trained(line=True, pairs=False), trained(line=False, pairs=False)):
        assert torch.allclose(found, want, rtol=1e-10, atol=1e-12)
    with pytest.raises(Refused, match="mixes samples"):
        trained(line=True, pairs=True)


def test_pairs_are_found_wherever_they_are() -> None:
    layout = Layout((Axis(0), Axis(0), Axis(0), None), 100)
    numbers = torch.arange(100)
    numbers[83] = 4
    names = [str(i) for i in range(100)]
    tree = (torch.zeros(100, 2), numbers, names, torch.zeros(3, dtype=torch.long))
    assert pairs_of(tree, layout) == {1: (4, 83), 2: None}
    assert {4, 83} <= set(spaced(100, pairs_of(tree, layout)))
    assert still_apart(None, pairs_of(tree, layout)) == {2} and still_apart(frozenset(), pairs_of(tree, layout)) == set()
