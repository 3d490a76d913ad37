"""What tells a place's state from an earlier one: the object that is there, the version of a tensor, the items of a list or an
array.

Not covered: writes through `.data` into tensors on an accelerator, where comparing waits for the device, or of many entries.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.engine.batch_dependent import ENTRIES
from memfit.engine.places import ArrayPlace, AssignedPlace, Place, TensorPlace

TensorMark = tuple[int, int, torch.Tensor | None]


def mark_of(place: Place) -> Any:
    """Return the mark of a place's state now."""
    return mark_of_tensor(place.tensor) if isinstance(place, (TensorPlace, AssignedPlace)) else place.value()


def mark_of_tensor(tensor: torch.Tensor) -> TensorMark:
    """Return the mark of a tensor: its version, its storage, and a copy of a small one on the host."""
    if tensor.layout is not torch.strided or tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor._version, 0, None
    small = tensor.device.type == "cpu" and tensor.numel() <= ENTRIES
    return tensor._version, tensor.untyped_storage()._cdata, tensor.detach().clone() if small else None


def is_at(place: Place, mark: Any) -> bool:
    """Whether a place is as it was at a mark."""
    if isinstance(place, (TensorPlace, AssignedPlace)):
        return is_tensor_at(place.tensor, mark)
    if isinstance(place, ArrayPlace):
        now = place.array
        return now.shape == mark.shape and bool(((now == mark) | ((now != now) & (mark != mark))).all())
    now = place.value()
    if isinstance(mark, list) and isinstance(now, list):
        return len(mark) == len(now) and all(a is b for a, b in zip(mark, now))
    return mark is now


def is_tensor_at(tensor: torch.Tensor, mark: TensorMark) -> bool:
    """Whether a tensor is as it was at a mark."""
    version, storage, copy = mark
    if tensor._version != version or (storage and tensor.untyped_storage()._cdata != storage):
        return False
    return copy is None or torch.equal(tensor, copy) or bool(same_entries(tensor, copy).all())


def same_entries(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which entries of two tensors of one shape are the same, on their device."""
    return (one == other) | (one.isnan() & other.isnan())
