"""Counts that may be a loss's denominator: of labels, masks and numbers in the leaves of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.batches.tree import Path, leaf_at, leaves, path_name
from memfit.batches.weights import Count, entries_other_than
from memfit.engine.accumulate import WeightsChanged
from memfit.engine.work import Work


@dataclass(frozen=True)
class LeafCount:
    """Counts valid entries in one leaf of a micro-batch."""

    path: Path
    """Path to the leaf."""
    rule: str
    """labels: entries other than -100. shifted: likewise without the first position. mask: the sum. nonzero: other than 0."""
    label: str
    """Description."""

    def __call__(self, inputs: Any) -> Count:
        leaf = leaf_at(inputs, self.path)
        if not isinstance(leaf, torch.Tensor):
            raise WeightsChanged(f"there is no {path_name(self.path)} to count in")
        if self.rule == "labels":
            return entries_other_than(leaf, -100)
        if self.rule == "shifted":
            return entries_other_than(leaf[..., 1:], -100)
        return entries_other_than(leaf, 0) if self.rule == "nonzero" else self._sum(leaf)

    def counts_all(self, inputs: Any) -> bool:
        """Whether every entry counts one, so that counts are proportional to samples; False if the host does not know."""
        leaf = leaf_at(inputs, self.path)
        if type(leaf) is not torch.Tensor or leaf.device.type != "cpu":
            return False
        if self.rule == "mask":
            return bool((_readable(leaf) == 1).all())
        count = self(inputs)
        return isinstance(count, int) and count == (leaf[..., 1:] if self.rule == "shifted" else leaf).numel()

    def _sum(self, mask: torch.Tensor) -> Count:
        # NumPy reads a count on the CPU without anything that looks like a device synchronization.
        if mask.device.type != "cpu" or type(mask) is not torch.Tensor:
            return mask.sum()
        total = float(_readable(mask).sum())
        if not total.is_integer():
            raise WeightsChanged(f"{path_name(self.path)} no longer holds only ones and zeros")
        return int(total)


def _readable(tensor: torch.Tensor) -> Any:
    """Return values on the host for NumPy, which lacks bfloat16."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def candidate_counts(work: Work, samples: int) -> list[LeafCount]:
    """Return the counts of the inputs that a hand-written loss could divide by."""
    found: list[LeafCount] = []

    def look(inputs: Any) -> Count:
        for path, leaf in leaves(inputs):
            if isinstance(leaf, torch.Tensor):
                found.extend(_rules(path, leaf))
        return 0

    work.inputs(0, samples, look)
    return found


def _rules(path: Path, leaf: torch.Tensor) -> Iterator[LeafCount]:
    name = path_name(path)
    is_mask = leaf.dtype is torch.bool or (leaf.dim() > 0 and not leaf.is_complex() and _zeros_and_ones(leaf))
    if is_mask:
        yield LeafCount(path, "mask", f"the entries set in {name}")
    if not leaf.is_floating_point() and (leaf.dim() == 1 if is_mask else leaf.dim() > 0) and leaf.dtype is not torch.bool:
        yield LeafCount(path, "labels", f"the valid labels in {name}")
        if leaf.dim() > 1:
            yield LeafCount(path, "shifted", f"the valid labels after the first position in {name}")
            yield LeafCount(path, "nonzero", f"the entries of {name} that are not padding")


def _zeros_and_ones(leaf: torch.Tensor) -> bool:
    return bool(((leaf == 0) | (leaf == 1)).all())
