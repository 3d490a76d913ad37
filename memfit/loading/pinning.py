"""Pins batches that are collated in the main process, as the script's own loader would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from memfit.loading.pieces import Counted


def pinning_works() -> bool:
    """Whether host memory can be pinned for the accelerator here."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return torch.cuda.is_available()
    device = torch.accelerator.current_accelerator()
    return device is not None and torch.accelerator.is_available() and device.type != "mps"  # torch cannot pin for mps


def with_pinned(counted: Counted) -> Counted:
    """Return a counted batch with its tensors in pinned memory."""
    return counted._replace(batch=pinned(counted.batch))


def collate_and_pin(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return the collated samples with their tensors in pinned memory."""
    return pinned(collate_fn(samples))
