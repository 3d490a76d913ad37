"""Micro-batches for samples of different sizes: what lies between two traced sizes, against a trace there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim import AdamW
from zoo import FAMILIES

import memfit
from memfit.planning.sizes import by_size, padded_elements, peak_between, peak_of, peaks_of, with_padding
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import Timing

SHORT, MIDDLE, LONG = 6, 11, 16


@cache
def traced(family_name: str, length: int) -> tuple[int, Profile]:
    """(elements of a sample of that many tokens, its profile)."""
    family = FAMILIES[family_name]
    model = family.build("tiny")
    batch: dict[str, Any] = {key: _of_length(tensor, length) for key, tensor in _first(family).items()}
    elements = sum(tensor[0].numel() for tensor in batch.values())
    return elements, memfit.profile(model, AdamW(model.parameters()), batch, loss_fn=family.loss)


def _first(family: Any) -> dict[str, torch.Tensor]:
    return family.collate([family.dataset(size="tiny", n=1)[0]] * 6)


def _of_length(tensor: torch.Tensor, length: int) -> torch.Tensor:
    repeats = -(-length // tensor.shape[1])
    return tensor.repeat(1, repeats)[:, :length].clone()


@pytest.mark.parametrize("family_name", ["t5", "bert"])
@pytest.mark.parametrize("samples", [1, 2, 8, 32])
def test_a_size_between_two_traced_ones_needs_what_its_own_trace_says(family_name: str, samples: int) -> None:
    ends = (traced(family_name, SHORT), traced(family_name, LONG))
    elements, middle = traced(family_name, MIDDLE)
    found, own = peak_between(ends, elements, samples), middle.peak(samples)
    assert found.allocated == pytest.approx(own.allocated, rel=0.005)
    assert found.upper >= own.allocated
    for (size, _), other in zip(ends, (SHORT, LONG)):
        assert peak_between(ends, size, samples) == traced(family_name, other)[1].peak(samples)


def test_no_entry_of_a_table_needs_more_than_the_room() -> None:
    ends = (traced("t5", SHORT), traced("t5", LONG))
    room = ends[1][1].peak(5).upper
    plan = memfit.plan(ends[1][1], memfit.probe(budget="1GiB", device="cpu"), target_batch=64, micro_batch=16)
    table = by_size(ends, plan, room, ends[0][0])
    assert [elements for elements, _, _ in table] == sorted({elements for elements, _, _ in table})
    assert all(peak_between(ends, elements, most).upper <= room and n <= most for elements, n, most in table)
    assert table[-1][2] == 5 and table[0][2] > 5
    whole = peak_of(ends, table, [size for size, n, _ in reversed(table) for _ in range(n)])
    assert whole.expected <= whole.upper <= room and len(peaks_of(ends, table)) == len(table)


def test_the_largest_micro_batch_runs_first_and_meets_no_gradients() -> None:
    ends = (traced("t5", SHORT), traced("t5", LONG))
    (low, small), (high, large) = ends
    table = ((low, 8, 8), (high, 4, 4))
    alone = large.peak(4, accumulates=False).expected
    assert peak_of(ends, table, [high] * 4).expected == alone < large.peak(4).expected
    assert peak_of(ends, table, [high] * 8).expected == large.peak(4).expected
    assert peak_of(ends, table, [high] * 4 + [low] * 8).expected == max(alone, small.peak(8).expected)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 5000))
def test_padding_is_what_samples_are_short_of_the_largest_they_stand_with(sizes: list[int], wanted: int) -> None:
    sizes = sorted(sizes, reverse=True)
    found = padded_elements(sizes, wanted)
    assert sum(sizes) <= found <= len(sizes) * sizes[0]
    if wanted >= len(sizes) * sizes[0]:
        assert found == len(sizes) * sizes[0]
    if wanted == 1:
        assert found == sum(sizes)


def test_whole_batches_of_very_different_samples_are_not_taken_for_the_fastest() -> None:
    sizes = [200, *[10] * 31]
    timings = tuple(Timing(n, 0.1 + 0.02 * n, 0.01 * n, (("block", 0.01 * n),)) for n in (1, 8, 32, 640))
    found = with_padding(replace(traced("bert", SHORT)[1], timings=timings), 10, sizes).timings
    assert found[0] == timings[0]  # a single sample is padded to itself
    per_sample = {timing.samples: timing.seconds / timing.samples for timing in found}
    assert per_sample[8] < per_sample[1] and per_sample[8] < per_sample[640]
    assert found[-1].blocks[0][1] == pytest.approx(6.4 * 200 * 32 / sum(sizes))
