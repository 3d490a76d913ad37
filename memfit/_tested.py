"""The versions of torch that this version of memfit was tested with."""

from __future__ import annotations

OLDEST, NEWEST = (2, 13), (2, 13)


def untested(version: str) -> str | None:
    """Return a message for a torch version outside the tested range, or None if it is inside or cannot be parsed."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers):
        return None
    if OLDEST <= (int(numbers[0]), int(numbers[1])) <= NEWEST:
        return None
    known = " to ".join(dict.fromkeys(".".join(map(str, v)) for v in (OLDEST, NEWEST)))
    return f"memfit was tested with torch {known}, and this is {version}: run memfit.verify once"
