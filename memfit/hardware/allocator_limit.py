"""Limits what torch's caching allocator reserves, so that a budget below the device's size is kept as the device's size is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.hardware.driver import numbered


def can_limit(device: torch.device) -> bool:
    """Whether the limit can be set and restored: torch tells it since 2.8."""
    return device.type == "cuda" and hasattr(torch.cuda, "get_per_process_memory_fraction")


@contextmanager
def reserving_at_most(limit: int, device: torch.device) -> Iterator[None]:
    """Lets the allocator reserve at most `limit` bytes inside, or less if the script says so.

    Beyond that the allocator releases the segments that nothing uses before it asks for another, as where a device is full, and
    then raises torch.OutOfMemoryError. Micro-batches of several sizes leave segments of several sizes: without a limit all of
    them stay reserved (on an H100 a GPT reserved 9.8 GiB for tensors of 5.9 GiB)."""
    device = numbered(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    allowed = (limit + 1) / torch.cuda.mem_get_info(device)[1]  # torch rounds the product down
    if not 0 < allowed < before:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(allowed, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
