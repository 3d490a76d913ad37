"""Compares batches with different numbers of samples by the shapes of their tensors per sample."""

from __future__ import annotations

from typing import Any

import torch

from memfit.batches.cut import Layout, shared_samples
from memfit.batches.tree import flat, is_column

Shapes = tuple[tuple[int, ...], ...]


def shapes_per_sample(tree: Any, layout: Layout, samples: int | None) -> Shapes:
    """Return the shape of every leaf without the factor of the number of samples. If only `split` can cut the batch, drop the
    first dimension if it is the samples' in all tensors, else return nothing."""
    found = []
    if not layout.cuts:
        shared = samples is not None and shared_samples(tree) == samples
        return tuple(tuple(leaf.shape[1:]) for leaf in flat(tree) if isinstance(leaf, torch.Tensor)) if shared else ()
    for leaf, axis in zip(flat(tree), layout.axes):
        if not isinstance(leaf, torch.Tensor):
            found.append(())
        elif axis is None:
            found.append(tuple(leaf.shape))
        else:
            found.append((*leaf.shape[: axis.dim], axis.outer * axis.inner, *leaf.shape[axis.dim + 1 :]))
    return tuple(found)


def samples_by(tree: Any, layout: Layout) -> int | None:
    """Return the number of samples in a call with this layout, or None if its tensors disagree."""
    found = set()
    for leaf, axis in zip(flat(tree), layout.axes):
        if axis is not None:
            size = len(leaf) if is_column(leaf) else leaf.shape[axis.dim]
            found.add(axis.samples(size) if size % (axis.outer * axis.inner) == 0 else None)
    return found.pop() if len(found) == 1 else None


def no_larger(these: Shapes, those: Shapes) -> bool:
    """Whether no dimension of `these` is larger than in `those`, as far as both are known."""
    return not (these and those) or all(
        len(a) == len(b) and all(x <= y for x, y in zip(a, b)) for a, b in zip(these, those, strict=True)
    )
