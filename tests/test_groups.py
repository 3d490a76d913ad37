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
from memfit.equivalence.proof_samples import TRIED, Apart, entries_of, marks_of, most_telling, pairs_in, spaced

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
    numbers = torch.arange(100)
    numbers[83] = 4
    names = [str(i) for i in range(100)]
    found = entries_of((torch.zeros(100, 2), numbers, names, torch.zeros(3, dtype=torch.long)), 100)
    assert list(found) == [(1,), (2,)] and pairs_in(found) == {(1,): (4, 83)}
    assert {4, 83} <= set(spaced(100, pairs_in(found).values()))


@pytest.mark.parametrize("samples", [5, 8, 48])
@pytest.mark.parametrize("at", [(0, 1), (-2, -1), (1, 2), (0, -1)])
def test_a_proof_has_one_of_a_pair_in_each_part(samples: int, at: tuple[int, int]) -> None:
    numbers = torch.arange(samples)
    numbers[at[1]] = numbers[at[0]]
    marks = [marks_of((torch.randn(1, 3), numbers[i : i + 1])) for i in range(samples)]
    chosen = numbers[most_telling(marks, (2, 3))].tolist()
    assert set(chosen[:2]) & set(chosen[2:])


def test_each_of_two_keys_has_a_pair_in_both_parts() -> None:
    users, items = torch.arange(12), torch.arange(12)
    users[7], items[1] = users[0], items[2]
    marks = [marks_of((users[i : i + 1], items[i : i + 1])) for i in range(12)]
    chosen = most_telling(marks, (2, 3))
    for numbers in (users[chosen].tolist(), items[chosen].tolist()):
        assert set(numbers[:2]) & set(numbers[2:])


def test_lengths_that_fall_keep_their_order() -> None:
    lengths = torch.tensor([9, 9, 8, 6, 5, 4, 3, 2])
    chosen = most_telling([marks_of((lengths[i : i + 1],)) for i in range(8)], (2, 3))
    assert chosen == sorted(chosen)


@pytest.mark.parametrize("first", [(0, 1), (6, 7), (0, 7)])
def test_a_pair_that_comes_later_is_looked_at_wherever_it_is(first: tuple[int, int]) -> None:
    model = Attending()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    for step in range(6):
        groups = torch.arange(8) + 10 * step
        if step == 5:
            groups[first[1]] = groups[first[0]]
            with pytest.raises(Refused, match="mixes samples"):
                model(torch.randn(8, 7).double(), groups)
        else:
            model(torch.randn(8, 7).double(), groups).square().mean().backward()


def test_what_cannot_be_in_both_parts_is_tried_a_few_times() -> None:
    apart, entries = Apart(), {(0,): [0, 1, 2, 3, 4]}
    apart.proven(entries, 2)
    repeated = (torch.tensor([7, 7, 8, 9]),)
    assert [apart.pairs_in(repeated, 4, waits=False) for _ in range(TRIED + 2)] == [True] * TRIED + [False] * 2
    apart = Apart()
    apart.proven(entries, 2)
    apart.proven({(0,): [0, 1, 2, 3, 1]}, 2)
    assert not apart.pairs_in(repeated, 4, waits=False)
    apart.proven(entries, 2)  # a later batch without pairs: they have been looked at
    assert not apart.pairs_in(repeated, 4, waits=False)
