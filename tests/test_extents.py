"""Samples that are long in one tensor and short in another: each tensor's size counts by itself, and so does padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import Notes
from hypothesis import given, strategies as st
from stepping import is_fake, ragged_loader
from torch import Tensor, nn

import memfit
from memfit.batches.extents import Scale, of_those_after, together
from memfit.batches.samples import SampleBatch, count_elements, extent_of

EXTENTS = st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 300)] * n), min_size=1, max_size=12))


@given(EXTENTS)
def test_what_comes_after_is_covered_in_every_tensor(extents: list[tuple[int, ...]]) -> None:
    after = of_those_after(extents)
    for i, most in enumerate(after):
        assert most == together(extents[i:])


@given(EXTENTS, EXTENTS)
def test_a_size_is_no_smaller_than_that_of_anything_smaller(planned: list[tuple[int, ...]], met: list[tuple[int, ...]]) -> None:
    path = of_those_after(sorted(planned, key=sum, reverse=True))[::-1]
    scale = Scale(path)
    for extent in path:
        assert scale.covers(extent) and sum(extent) <= scale.size(extent) <= sum(path[-1])
    for extent in met:
        if not scale.covers(extent):
            continue
        for n, one in enumerate(path):
            if all(a >= b for a, b in zip(extent, one)):
                assert scale.size(extent) >= sum(one)
            if all(a <= b for a, b in zip(extent, one)):
                assert scale.size(extent) <= max(sum(one), sum(extent)), n


def test_where_tensors_grow_alike_sizes_are_elements() -> None:
    scale = Scale([(n, n, 1) for n in (4, 9, 50)])
    assert [scale.size((n, n, 1)) for n in (2, 4, 7, 30, 50)] == [5, 9, 15, 61, 101]
    assert not scale.covers((51, 2, 1)) and not scale.covers((50, 50)) and scale.within((50, 60, 1))


@pytest.mark.parametrize(
    ("sample", "extent"),
    [
        ((torch.zeros(3, 2), torch.zeros(5)), (6, 5)),
        ({"audio": torch.zeros(7), "text": [1, 2, 3], "label": 2}, (7, 3, 1)),
        (({"ids": [1, 2], "mask": (1, 0)}, 1), (2, 1, 1, 1)),
        (tuple(range(40)), (40,)),
        (torch.zeros(4), (4,)),
    ],
)
def test_extents_of_samples(sample: Any, extent: tuple[int, ...]) -> None:
    assert extent_of(sample) == extent and sum(extent) == count_elements(sample)


def test_samples_that_hold_different_things_are_one_number() -> None:
    batch = SampleBatch([(torch.zeros(3), torch.zeros(2)), (torch.zeros(4),)], list)
    assert batch.extents() == [(5,), (4,)] and batch.sizes() == [5, 4]
    assert SampleBatch([[torch.zeros(3), torch.zeros(2)]], list).extents() == [(3, 2)]


class Pairs(nn.Module):
    """Every frame of audio beside every word: what it holds is their product."""

    def __init__(self) -> None:
        super().__init__()
        self.audio, self.text = nn.Linear(1, 16, bias=False), nn.Embedding(50, 16, padding_idx=0)
        self.seen = Notes()

    def forward(self, audio: Tensor, text: Tensor) -> Tensor:
        if not is_fake(audio):
            self.seen.append(len(audio) * audio.shape[1] * text.shape[1])
        pairs = self.audio(audio[..., None])[:, :, None] * self.text(text)[:, None]
        return pairs.tanh().sin().sum((1, 2, 3))  # (padding gives zeros)


def padded(samples: list[Any]) -> Any:
    audio, text, target = zip(*samples)
    return (
        nn.utils.rnn.pad_sequence(list(audio), batch_first=True),
        nn.utils.rnn.pad_sequence(list(text), batch_first=True),
        torch.stack(target),
    )


def sample(audio: int, text: int) -> Any:
    return torch.randn(audio), torch.randint(1, 50, (text,)), torch.randn(())


def products(samples: list[Any], budget: str, order: int) -> tuple[list[int], int, list[str]]:
    """(audio x text in each micro-batch of an epoch, most that a micro-batch of the plan may hold of it, what was noted)."""
    random.Random(order).shuffle(samples)
    model = Pairs()
    run = memfit.wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        ragged_loader(samples, 16, padded),
        loss_fn=lambda m, b: (m(b[0], b[1]) - b[2]).square().mean(),
        budget=budget,
    )
    model.seen.clear()
    for batch in run.loader:
        run.step(batch)
    assert run.plan is not None
    room = run.plan.limit - run.plan.held
    return model.seen, room // (16 * 4), [event.message for event in run.events]


@pytest.mark.parametrize("order", range(3))
def test_a_micro_batch_holds_no_more_than_fits_of_samples_that_are_long_in_different_tensors(order: int) -> None:
    samples = [sample(300, 5) for _ in range(24)] + [sample(60, 80) for _ in range(24)]
    seen, most, _ = products(samples, "300 MiB", order)
    assert len(seen) > 3 and max(seen) <= most  # (activations are this several times)


def test_a_sample_that_is_longer_in_one_tensor_is_planned_for_before_it_runs() -> None:
    samples = [sample(100, 20) for _ in range(40)]
    _, _, before = products(list(samples), "300 MiB", 0)
    late = [*samples, *[sample(40, 60) for _ in range(8)]]
    model = Pairs()
    run = memfit.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn=lambda m, b: (m(b[0], b[1]) - b[2]).square().mean()
    )
    run.step(SampleBatch(late[:16], padded))
    run.step(SampleBatch(late[-16:], padded))
    messages = [event.message for event in run.events]
    assert any("replanned before they run" in message for message in messages)
    assert not any("replanned" in message for message in before)
