"""Micro-batches for samples of different sizes: what lies between two traced sizes, against a trace there."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from zoo import FAMILIES

import memfit
from memfit.planning.sizes import by_size, peak_between, peak_of, peaks_of
from memfit.profiling.profile import Profile

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
