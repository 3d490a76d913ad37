"""The allocator's size rules, as in torch 2.13: how a request is rounded, and how much the driver is asked for."""

from __future__ import annotations

from memfit._units import MiB
from memfit.allocators.settings import INTERVALS, AllocatorSettings

MIN_BLOCK = 512
SMALL = MiB
"""Requests that round to at most this size use the small pool."""
SMALL_SEGMENT = 2 * MiB
MIN_LARGE = 10 * MiB
"""Requests of at least this size get a segment of their own size."""
ROUND_LARGE = 2 * MiB


def rounded_size(size: int, settings: AllocatorSettings) -> int:
    """Return the block size for a request of `size` bytes."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    interval = min(max(size.bit_length() - 1 - 20, 0), INTERVALS - 1)
    divisions = settings.roundup_power2_divisions[interval]
    if divisions > 1 and size > MIN_BLOCK * divisions:
        return _next_division(size, divisions)
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def _next_division(size: int, divisions: int) -> int:
    """Round `size` up to a division of the power of two below it; powers of two stay."""
    if size & (size - 1) == 0:
        return size
    part = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
    return -(-size // part) * part


def segment_size(rounded: int, settings: AllocatorSettings) -> int:
    """Return the bytes to request from the driver for a block of `rounded` bytes that is not cached."""
    if rounded <= SMALL:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return settings.large_segment_size
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def page_size(*, small: bool, settings: AllocatorSettings) -> int:
    """Return the bytes by which an expandable segment grows."""
    return SMALL_SEGMENT if small else settings.large_segment_size
