"""Adds up losses and counts of micro-batches: on the host where they are numbers, else on the device, without waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from memfit.batches.weights import Count

_NUMBERS = (torch.float32, torch.float64)


def weighted_sum(
    losses: Sequence[torch.Tensor | float], weights: Sequence[Count | float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | float:
    """Return a number if all values are on the host, else a tensor on the device, without a synchronization."""
    by_weight: dict[float, list[torch.Tensor]] = {}
    counted: list[tuple[torch.Tensor, torch.Tensor]] = []
    on_host = 0.0
    for loss, weight in zip(losses, weights):
        if isinstance(weight, torch.Tensor):
            there = loss.to(device) if isinstance(loss, torch.Tensor) else torch.full((), loss, dtype=dtype, device=device)
            counted.append((there, weight.to(device)))
        elif isinstance(loss, torch.Tensor):
            by_weight.setdefault(weight, []).append(loss.to(device))
        else:
            on_host += loss * weight
    sums = [torch.stack(found).to(dtype).sum() * weight for weight, found in by_weight.items()]
    if counted:
        values, counts = (torch.stack(each).to(dtype) for each in zip(*counted))
        sums.append(values @ counts)
    total = sum(sums[1:], sums[0]) if sums else on_host
    return total + on_host if sums and on_host else total


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating point dtype of the device."""
    return torch.float32 if device.type == "mps" else torch.float64


def value_of(loss: torch.Tensor) -> torch.Tensor | float:
    """Return the detached loss, as a number if it is on the CPU. Clones it out of a large storage: mse_loss and others write
    their mean into the memory of the unreduced values (aten/src/ATen/native/Loss.cpp)."""
    value = loss.detach()
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.dtype in _NUMBERS:
        return float(value.numpy())
    return value if value.untyped_storage().nbytes() <= 64 else value.clone()


def sum_of(counts: Sequence[Count]) -> Count:
    """Return the sum of counts, on the device if one of them is there."""
    on_host = sum(count for count in counts if not isinstance(count, torch.Tensor))
    on_device = [count for count in counts if isinstance(count, torch.Tensor)]
    if not on_device:
        return on_host
    total = torch.stack(on_device).sum()
    return total + on_host if on_host else total


def host_number(count: Count, known: Iterator[float]) -> Count:
    """Return a count as a number, taken from `known` if it is on a device."""
    number = next(known) if isinstance(count, torch.Tensor) else count
    return int(number) if float(number).is_integer() else number
