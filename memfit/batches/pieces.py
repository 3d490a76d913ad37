"""How many samples go into each micro-batch: arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def sizes(samples: int, largest: int) -> tuple[int, ...]:
    """`samples` in as few pieces of at most `largest` as possible, as equal as possible: 10 with room for 4 is 4, 3, 3."""
    pieces = -(-samples // max(1, largest))
    small, extra = divmod(samples, max(1, pieces))
    return (small + 1,) * extra + (small,) * (pieces - extra)


def equal_sizes(samples: int, largest: int) -> tuple[int, ...]:
    """At most two different sizes: pieces of `largest` and one remainder (compiled models are built once per size)."""
    full, rest = divmod(samples, max(1, largest))
    return (max(1, largest),) * full + ((rest,) if rest else ())


def bounds(pieces: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each piece."""
    start = 0
    for piece in pieces:
        yield start, start + piece
        start += piece
