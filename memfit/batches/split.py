"""Cuts batches by the user's `split`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memfit._errors import UsageError

Split = Callable[[Any, list[int]], Sequence[Any]]
"""Maps a batch and sizes in samples to batches of those sizes."""


def part_of_split(split: Split, batch: Any, start: int, stop: int, samples: int) -> Any:
    """Return the samples `start:stop` of a batch that only `split` can cut."""
    sizes = [start, stop - start, samples - stop]
    wanted = [size for size in sizes if size]
    parts = split(batch, wanted)
    if not isinstance(parts, (list, tuple)) or len(parts) != len(wanted):
        what = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else f"something of type {type(parts).__name__}"
        raise UsageError(
            f"cutting the batch with split= into parts of {', '.join(map(str, wanted))} samples",
            found=f"it returned {what}",
            next_move="return a list with one batch for each of the sizes it was given",
        )
    return parts[1 if start else 0]
