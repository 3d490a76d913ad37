"""Describes one leaf of a model's output: how it grows with the samples, and how micro-batches are joined into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memfit._errors import Refused
from memfit.batches.cut import Axis
from memfit.batches.tree import Path, path_name
from memfit.capture.not_joined import NotJoined


class Named(str):
    """The name of a value that leaves the forward as a side effect, not in its output."""

    __slots__ = ()


@dataclass(frozen=True)
class Leaf:
    """Describes one leaf of an output."""

    kind: Literal["batch", "constant", "loss", "value", "size", "opaque"]
    """batch: has one entry per sample. constant: a tensor that does not. loss: a differentiable scalar. value: a non-tensor
    that is the same for every batch. size: a number in a distribution's shape that grows with the batch. opaque: cannot be
    joined (a cache, a number read from a tensor)."""
    path: Path
    """Path to the leaf in the output."""
    shape: tuple[int, ...] = ()
    """Shape for `few` samples."""
    dtype: torch.dtype = torch.float32
    """Data type."""
    device: torch.device | str = "cpu"
    """Device."""
    differentiable: bool = False
    """Whether gradients flow through it."""
    axis: Axis | None = None
    """For "batch": the dimension of the samples."""
    joined: Literal["first", "mean", "sum"] = "first"
    """For "constant" and "loss": how micro-batches are reduced to the whole's value. "mean" is weighted by samples."""
    alike: bool = False
    """For "constant" and "loss": whether whole and parts were the same where it was proven, so that they have to be."""
    value: Any = None
    """For "value": the value. For "size": the value per sample. For "opaque": its type."""

    @property
    def is_beside(self) -> bool:
        """Whether it left the forward as a side effect instead of in its output."""
        return bool(self.path) and isinstance(self.path[0], Named)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor that is joined from micro-batches."""
        return self.kind in ("batch", "constant", "loss")

    def without_tensor(self, samples: int) -> Any:
        """Returns the value of a non-tensor leaf in an output of `samples` samples."""
        if self.kind == "opaque":
            return NotJoined(name_in(self.path), self.value)
        return self.value * samples if self.kind == "size" else self.value

    def shape_for(self, samples: int) -> tuple[int, ...]:
        """Returns the shape for `samples` samples."""
        if self.axis is None:
            return self.shape
        dim = self.axis.dim
        return (*self.shape[:dim], self.axis.size(samples), *self.shape[dim + 1 :])

    def check(self, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        """Raises Refused if the parts' shapes differ from what the batch dimension predicts for these micro-batches."""
        wanted = [self.shape_for(size) for size in sizes]
        found = [tuple(part.shape) for part in parts if isinstance(part, torch.Tensor)]
        if self.axis is not None and found != wanted:
            raise self.of_other_size(wanted, found)

    def of_other_size(self, wanted: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]]) -> Refused:
        """Returns the refusal of an output whose size depends on the values in its batch."""
        return Refused(
            "joining the outputs of micro-batches",
            found=f"{name_in(self.path)} has the shape {_listed(found)} where {_listed(wanted)} was expected: its "
            "size depends on the batch's content (such as its longest sample)",
            next_move="pass loss_fn= and call run.step(batch), where each micro-batch has a loss of its own; or pad all "
            "batches to the same length",
        )

    def join(self, parts: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Joins the parts of micro-batches of these sizes into the leaf of all samples."""
        if self.axis is not None:
            return self.axis.join(parts)
        if self.joined == "first":
            return parts[0]
        weights = [1 if self.joined == "sum" else size / sum(sizes) for size in sizes]
        return torch.stack([part * weight for part, weight in zip(parts, weights)]).sum(0)

    def bytes_for(self, samples: int) -> int:
        """Returns its bytes for `samples` samples."""
        count = 1
        for size in self.shape_for(samples):
            count *= size
        return count * self.dtype.itemsize

    def gradient_part(self, gradient: torch.Tensor | None, start: int, stop: int, samples: int) -> torch.Tensor | None:
        """Returns the part of its gradient that belongs to the samples `start:stop` of so many."""
        if gradient is None:
            return None
        if self.axis is not None:
            return self.axis.narrow(gradient, start, stop)
        if self.joined == "first":
            return gradient if start == 0 else None
        return gradient if self.joined == "sum" else gradient * ((stop - start) / samples)


def name_in(path: Path) -> str:
    """Returns a leaf's name in the output, as it would be typed."""
    if len(path) > 1 and isinstance(path[1], Named):
        path = path[1:]
    return path_name(path[1:], str(path[0])) if path and isinstance(path[0], Named) else path_name(path, "output")


def turned(axis: Axis) -> Axis:
    """Returns the axis with samples varying fastest instead of slowest (time before batch)."""
    return Axis(axis.dim, outer=axis.inner, inner=axis.outer)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(shape) for shape in dict.fromkeys(shapes))
