"""Cuts batches by the user's `split`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit._errors import UsageError
from memfit.batches.tree import first_same, flat, rebuild

Split = Callable[[Any, list[int]], Sequence[Any]]
"""Maps a batch and sizes in samples to batches of those sizes."""


def part_of_split(split: Split, batch: Any, start: int, stop: int, samples: int) -> Any:
    """Return the samples `start:stop` of a batch that only `split` can cut."""
    sizes = [start, stop - start, samples - stop]
    wanted = [size for size in sizes if size]
    parts = split(batch, wanted)
    if not isinstance(parts, (list, tuple)) or len(parts) != len(wanted):
        what = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else f"something of type {type(parts).__name__}"
        raise UsageError(
            f"cutting the batch with split= into parts of {', '.join(map(str, wanted))} samples",
            found=f"it returned {what}",
            next_move="return a list with one batch for each of the sizes it was given",
        )
    return _one_again(parts[1 if start else 0], batch)


def _one_again(part: Any, batch: Any) -> Any:
    """Return a part in which what is one tensor in the batch is one, too: a forward may ask whether its query is its key, and
    functions that cut leaf by leaf make two of it."""
    order, own = first_same(flat(batch)), flat(part)
    if len(set(order)) == len(order) or len(own) != len(order):
        return part
    return rebuild(part, iter([own[j] if _are_same(own[i], own[j]) else own[i] for i, j in enumerate(order)]))


def _are_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.layout is not torch.strided:
        return False
    look = (one.shape, one.stride(), one.storage_offset(), one.dtype)
    return look == (other.shape, other.stride(), other.storage_offset(), other.dtype) and (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )
