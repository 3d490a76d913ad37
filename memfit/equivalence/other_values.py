"""Other values for state, from which a forward can go on: to see what it makes of state that hardly moves in a proof."""

from __future__ import annotations

from typing import Any

import torch

from memfit.batches.tree import map_tensors, tensors
from memfit.equivalence.same_values import as_tensor

OFFSET = 0.01
"""What zeros become, at most twice."""
LATER = 720720
"""Forwards that counters are put ahead by. Most of what begins later or is due now and then happens there: it is a multiple of
all numbers up to 16."""


def other_value(value: Any) -> Any:
    """Return a value of the same kind with other numbers, or None if it holds no tensor or array of floating-point numbers. All
    signs stay: forwards take roots of variances."""
    array = as_tensor(value)
    if array is not value:
        return _other(array.clone()).numpy() if array.is_floating_point() else None
    if not isinstance(value, (torch.Tensor, list, tuple, dict)):
        return None
    found = [tensor for tensor in tensors(value) if _is_real(tensor)]
    return map_tensors(lambda tensor: _other(tensor) if _is_real(tensor) else tensor, value) if found else None


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.requires_grad and not tensor.is_meta and type(tensor) is torch.Tensor


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Scale the entries by 0.05 to 0.95 and move them apart: a maximum is lower then, a vector has another direction."""
    angle = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32).reshape(tensor.shape)
    made = tensor.detach() * (0.5 - 0.45 * angle.cos()) + OFFSET * (1 + (angle + 1).sin())
    return made.to(tensor.dtype)


def later_count(before: Any, after: Any) -> Any:
    """Return what a tensor, an array or a list of one number that counts forwards holds after `LATER - 1` of them; None for
    anything else. `before` and `after` a forward it had these values. (Other counters are asked: `engine/asked_numbers.py`.)"""
    if isinstance(before, torch.Tensor):
        return torch.full_like(before, LATER - 1) if _is_whole(before) and _is_whole(after) else None
    if as_tensor(before) is not before:
        later = later_count(as_tensor(before), as_tensor(after))
        return None if later is None else later.numpy()
    counts = type(before) is type(after) is list and len(before) == len(after) == 1
    return [LATER - 1] if counts and type(before[0]) is type(after[0]) is int else None


def _is_whole(value: Any) -> bool:
    """Whether it is a tensor of one whole number, of a type that can count far."""
    if type(value) is not torch.Tensor or value.numel() != 1 or value.dtype not in _WIDE or value.is_meta:
        return False
    return float(value).is_integer()


_WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)
