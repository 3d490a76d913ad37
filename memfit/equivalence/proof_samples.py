"""Chooses the samples that a proof runs on: those on which loss weightings differ most, by labels, masks and numbers.

The first samples of a batch may be of one class, or all be counted; then every weighting looks right on them.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from memfit.batches.tree import leaves

LOOKED_AT = 48
"""Samples of a batch that are examined."""
SMALL = 1 << 16
"""Elements up to which a leaf of one sample is read; labels and masks are smaller."""
TRIES = 200
"""Random choices that are compared."""

Marks = dict[Hashable, float]
"""What a loss might count in one sample: valid labels, classes, mask entries, weights."""


def spaced(samples: int) -> list[int]:
    """Return the indices of the samples to examine, spread over the batch."""
    looked_at = min(samples, LOOKED_AT)
    return [i * samples // looked_at for i in range(looked_at)]


def marks_of(sample: Any) -> Marks:
    """Return the marks of one sample, which is a batch of one."""
    found: Marks = {}
    for path, leaf in leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and 0 < leaf.numel() <= SMALL:
            found.update({(path, name): value for name, value in _marks(leaf.detach()).items()})
    return found


def _marks(leaf: torch.Tensor) -> dict[str, float]:
    if leaf.is_complex() or (leaf.is_floating_point() and leaf.numel() > 1 and not bool(((leaf == 0) | (leaf == 1)).all())):
        return {}
    entries = leaf.to("cpu", torch.float64).numpy()  # not item(): reading a scalar off a tensor looks like a device sync
    found = {"set": float((entries != 0).sum()), "valid": float((entries != -100).sum())}
    return found | ({"value": float(entries.reshape(-1)[0])} if entries.size == 1 else {})


def most_telling(marks: Sequence[Marks], sizes: Sequence[int]) -> list[int]:
    """Return indices of samples for two parts of these `sizes`, in order, chosen so that the marks of the parts differ most.
    Both parts should keep something that counts: a part without a loss proves nothing."""
    count, first = sum(sizes), sizes[0]
    columns = _columns(marks)
    if not columns or len(marks) <= count or len(sizes) < 2:
        return list(range(count))
    draw = random.Random(0)
    tried = [list(range(count)), *(draw.sample(range(len(marks)), count) for _ in range(TRIES))]
    for column in columns:
        low = sorted(range(len(marks)), key=column.__getitem__)
        tried += [[*low[:first], *low[first - count :]], [*low[-first:], *low[: count - first]]]
    return max(tried, key=lambda chosen: _score(chosen, first, columns))


def _columns(marks: Sequence[Marks]) -> list[list[float]]:
    """Return the marks that all samples have and that differ between them, scaled to [0, 1]."""
    names = [name for name in marks[0] if all(name in m for m in marks)] if marks else []
    found = []
    for name in names:
        values = [m[name] for m in marks]
        low, high = min(values), max(values)
        if low < high and abs(low) + abs(high) < float("inf"):
            found.append([(v - low) / (high - low) for v in values])
    return found


def _score(chosen: Sequence[int], first: int, columns: Sequence[Sequence[float]]) -> float:
    kinds = {tuple(column[i] for column in columns) for i in chosen}
    score = len(kinds) / len(chosen)
    for column in columns:
        one, other = [column[i] for i in chosen[:first]], [column[i] for i in chosen[first:]]
        apart = abs(sum(one) / len(one) - sum(other) / len(other))
        score += (2 * min(apart, 0.5) + 0.5 * (max(one) > 0 < max(other)) + 0.25 * (min(one) < 1 > min(other))) / len(columns)
    return score
