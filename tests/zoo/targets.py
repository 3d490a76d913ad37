"""Where a batch keeps its labels, and how many of them a mean loss divides by."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.data import IGNORED

VOID = 255
"""The pixel label that segmentation ignores."""


def labels_of(batch: Any) -> Tensor:
    """The labels of a dict or of a tuple whose last entry they are."""
    return batch["labels"] if isinstance(batch, dict) else batch[-1]


def samples(batch: Any) -> int:
    return len(labels_of(batch))


def tokens(batch: Any) -> int:
    return int((labels_of(batch) != IGNORED).sum())


def next_tokens(batch: Any) -> int:
    """Tokens that have a predecessor: such models shift the labels themselves."""
    return int((labels_of(batch)[:, 1:] != IGNORED).sum())


def pixels(batch: Any) -> int:
    return int((labels_of(batch) != VOID).sum())
