"""Computes how many samples go into each micro-batch. Pure arithmetic.

`least` is the fewest samples that the model can run. If it is more than one, a piece may exceed the requested size, so that
no smaller piece remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Runs = tuple[tuple[int, int], ...]
"""Pieces in run-length encoding: (samples per piece, number of such pieces in a row)."""


def size_runs(samples: int, largest: int, least: int = 1) -> Runs:
    """Return `sizes` in run-length encoding."""
    pieces = min(-(-samples // max(least, largest)), max(1, samples // least))
    small, extra = divmod(samples, max(1, pieces))
    return _without_none((small + 1, extra), (small, pieces - extra))


def equal_size_runs(samples: int, largest: int, least: int = 1) -> Runs:
    """Return `equal_sizes` in run-length encoding."""
    full, rest = divmod(samples, max(least, largest))
    if 0 < rest < least:
        return size_runs(samples, largest, least)
    return _without_none((max(least, largest), full), (rest, 1 if rest else 0))


def sizes(samples: int, largest: int, least: int = 1) -> tuple[int, ...]:
    """Split into as few pieces of at most `largest` as possible, as equal as possible: 10 with `largest` 4 is 4, 3, 3."""
    return _one_by_one(size_runs(samples, largest, least))


def equal_sizes(samples: int, largest: int, least: int = 1) -> tuple[int, ...]:
    """Split into pieces of `largest` and one remainder: two sizes, because compiled models recompile for each size."""
    return _one_by_one(equal_size_runs(samples, largest, least))


def part_of(samples: int, rank: int, ranks: int) -> int:
    """Return this rank's part of `samples`. Parts are as equal as possible, and the first ranks take the remainder."""
    return samples // ranks + (rank < samples % ranks)


def divided(samples: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split `samples` as near as possible in proportion to `weights` (positive). The first parts take the remainder. No part
    is empty if there are at least as many samples as parts. Equal weights give the same as `part_of` on every rank."""
    whole, count = sum(weights), len(weights)
    parts = [samples * weight // whole for weight in weights]
    short = sorted(range(count), key=lambda i: -(samples * weights[i] % whole))[: samples - sum(parts)]
    for i in short:
        parts[i] += 1
    for i in range(count) if samples >= count else ():
        if not parts[i]:
            parts[max(range(count), key=parts.__getitem__)] -= 1
            parts[i] = 1
    return tuple(parts)


def count_of(runs: Runs) -> int:
    """Return the number of pieces."""
    return sum(count for _, count in runs)


def _without_none(*runs: tuple[int, int]) -> Runs:
    return tuple(run for run in runs if run[1])


def _one_by_one(runs: Runs) -> tuple[int, ...]:
    return tuple(size for size, count in runs for _ in range(count))


def next_size(left: int, wanted: int, least: int = 1) -> int:
    """Return the next piece of `left` samples: `wanted`, adjusted so that neither it nor the remainder is below `least`."""
    size = min(max(least, wanted), left)
    if left - size >= least or size == left:
        return size
    return left - least if left >= 2 * least else left


def pieces_by_size(elements: Sequence[int], samples_for: Callable[[int], int], least: int = 1) -> tuple[int, ...]:
    """Split samples with these numbers of elements, largest first. Each piece takes as many samples as `samples_for` returns
    for the largest sample in it."""
    found: list[int] = []
    start = 0
    while start < len(elements):
        found.append(next_size(len(elements) - start, samples_for(max(elements[start:])), least))
        start += found[-1]
    return tuple(found)


def bounds(pieces: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each piece."""
    start = 0
    for piece in pieces:
        yield start, start + piece
        start += piece
