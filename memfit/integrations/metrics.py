"""Gathers per-sample values from ranks with different numbers of samples."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather, gather_object, recursively_apply


def gather_uneven(data: Any, *, objects: bool, nothing: bool) -> Any:
    """Concatenate the values of all ranks: tensors along their first dimension, other objects as lists.

    `objects`: treat the data as lists in any case. `nothing`: this rank's data belong to no sample.
    """
    if not objects:
        try:
            return recursively_apply(_concatenated, data, nothing, error_on_other_type=True)
        except TypeError:  # not only tensors
            pass
    return gather_object([] if nothing else data)


def _concatenated(tensor: torch.Tensor, nothing: bool) -> torch.Tensor:
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    tensor = (tensor[:0] if nothing else tensor).contiguous()
    sizes = _gathered(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    most = max(1, *sizes)
    padded = tensor.new_zeros((most, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    return torch.cat([part[:size] for part, size in zip(_gathered(padded).split(most), sizes)])


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    found = gather(tensor)
    assert isinstance(found, torch.Tensor)
    return found
