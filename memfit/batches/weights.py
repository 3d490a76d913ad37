"""Computes the denominators of the known losses of torch.nn.functional. They are the weights of the micro-batches.

The mean over a batch is the sum over its parts of mean times denominator, divided by the sum of the denominators. A
denominator counts samples, valid labels, class weights or elements, depending on the loss. Not covered: losses with the
deprecated `size_average`/`reduce` arguments, and reductions other than "mean" and "sum". They take the general path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

FEW = 64
"""Up to this many labels, list.count is faster than NumPy."""

Count = float | torch.Tensor
Bound = dict[str, Any]


@dataclass(frozen=True)
class KnownLoss:
    """A loss of torch.nn.functional whose reduction memfit knows."""

    names: tuple[str, ...]
    """Its parameter names, in order."""
    defaults: dict[str, Any]
    """Their defaults, as torch documents them."""
    denominator: Callable[[Bound], Count]
    """Maps the bound arguments to the denominator of reduction="mean". A tensor stays on the arguments' device."""
    cut_with_input: tuple[str, ...] = ("target",)
    """Arguments with one entry per sample."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | None:
        """Return all arguments by name, or None for a call that is not supported."""
        bound = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        if bound.get("size_average") is not None or bound.get("reduce") is not None:
            return None
        if bound["reduction"] not in ("mean", "sum") or "input" not in bound or "target" not in bound:
            return None
        return bound


def known_loss(function: Any) -> KnownLoss | None:
    """Return the entry for a function of torch.nn.functional, or None."""
    return KNOWN_LOSSES.get(function)


_L1_LOSS = F.l1_loss  # the original, even while a substitute is patched in


def all_arguments(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that `__torch_function__` received for `function`, plus the one that torch left out."""
    if getattr(function, "__wrapped__", function) is not _L1_LOSS or "weight" in kwargs:
        return kwargs
    # torch 2.13 does not pass l1_loss's weight to tensor subclasses and modes. The calling frame still has it.
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _L1_LOSS.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals["weight"]
    return kwargs if weight is None else {**kwargs, "weight": weight}


def entries_mean(function: Any, bound: Bound) -> tuple[torch.Tensor, int, Count]:
    """Return (a mean over one part of a batch, the number of entries it divides by, the true denominator).

    It is the true mean if the denominator is known on the host. Otherwise it is the sum over valid entries divided by the
    number of all entries, which is never zero. So a part without valid entries gives zero instead of NaN, and nothing
    synchronizes. Parts are weighted by their entries, and the total is divided by the true denominator at the end.
    """
    count = KNOWN_LOSSES[function].denominator(bound)
    if _is_plain_mean(bound, count):
        return function(**bound), int(count), count
    entries = max(1, _entries(bound))
    return function(**{**bound, "reduction": "sum"}) / entries, entries, count


def valid_mean(function: Any, bound: Bound) -> tuple[torch.Tensor, Count]:
    """Return (the true mean over one part, its denominator). A part without valid entries gives zero instead of NaN."""
    count = KNOWN_LOSSES[function].denominator(bound)
    if _is_plain_mean(bound, count):
        return function(**bound), count
    total = function(**{**bound, "reduction": "sum"})
    if not isinstance(count, torch.Tensor):
        return total / max(count, 1), count
    divisor = torch.where(count == 0, torch.ones_like(count), count)
    return total / divisor.to(total.dtype), count


def _is_plain_mean(bound: Bound, count: Count) -> bool:
    """Whether torch's own mean can be used: its denominator is nonzero and known on the host, and its result is small.
    (mse_loss and others with float targets reduce in place, so the mean keeps the storage of the per-entry values.)"""
    return isinstance(count, int) and count > 0 and not bound["target"].is_floating_point()


def entries_other_than(tensor: torch.Tensor, value: int) -> Count:
    """Count the entries that differ from `value`. Returns a number if they are on the host, so that nothing looks like a
    synchronization. Fake tensors have no values: on the host, all their entries count."""
    if tensor.device.type != "cpu" or type(tensor) is not torch.Tensor or torch.compiler.is_compiling():
        fake = isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
        return tensor.numel() if fake else (tensor != value).sum()
    try:
        if tensor.dim() == 1 and tensor.shape[0] <= FEW:
            return tensor.shape[0] - tensor.tolist().count(value)
        return int(numpy.count_nonzero(tensor.detach().numpy() != value))
    except (RuntimeError, TypeError):  # NumPy lacks the dtype, or a torch.func transform wraps the tensor
        return (tensor != value).sum()


def _entries(bound: Bound) -> int:
    target = bound["target"]
    if target.is_floating_point():
        return torch.broadcast_shapes(bound["input"].shape, target.shape).numel()
    return target.numel()


def _class_count(bound: Bound) -> Count:
    scores, target, weight = bound["input"], bound["target"], bound["weight"]
    if target.is_floating_point():  # class probabilities: torch divides by samples times positions, with or without weights
        return scores.numel() // max(1, scores.shape[1] if scores.dim() > 1 else scores.shape[0])
    if weight is None:
        return entries_other_than(target, bound["ignore_index"])
    valid = target != bound["ignore_index"]
    chosen = weight[torch.where(valid, target, torch.zeros_like(target))]
    return (chosen * valid).sum()


def _element_count(bound: Bound) -> Count:
    return torch.broadcast_shapes(bound["input"].shape, bound["target"].shape).numel()


def _weighted_element_count(bound: Bound) -> Count:
    weight = bound["weight"]
    return _element_count(bound) if weight is None else weight.sum()


_OLD = {"size_average": None, "reduce": None, "reduction": "mean"}
_CLASSES = {"weight": None, "ignore_index": -100, **_OLD}
_OLD_NAMES = ("size_average", "reduce", "reduction")

KNOWN_LOSSES: dict[Any, KnownLoss] = {
    F.cross_entropy: KnownLoss(
        ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
        {**_CLASSES, "label_smoothing": 0.0},
        _class_count,
    ),
    F.nll_loss: KnownLoss(
        ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"), _CLASSES, _class_count
    ),
    F.mse_loss: KnownLoss(
        ("input", "target", *_OLD_NAMES, "weight"),
        {**_OLD, "weight": None},
        _weighted_element_count,
        ("target", "weight"),
    ),
    F.l1_loss: KnownLoss(
        ("input", "target", *_OLD_NAMES, "weight"),
        {**_OLD, "weight": None},
        _weighted_element_count,
        ("target", "weight"),
    ),
    F.binary_cross_entropy: KnownLoss(
        ("input", "target", "weight", *_OLD_NAMES), {"weight": None, **_OLD}, _element_count, ("target", "weight")
    ),
    F.binary_cross_entropy_with_logits: KnownLoss(
        ("input", "target", "weight", *_OLD_NAMES, "pos_weight"),
        {"weight": None, **_OLD, "pos_weight": None},
        _element_count,
        ("target", "weight", "pos_weight"),
    ),
}
