"""Formats and parses bytes and seconds. Inside memfit, memory is an `int` of bytes and time is a `float` of seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable

from memfit._errors import UsageError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
BEYOND = 1 << 60
"""Size in bytes that no machine has."""
_READABLE = 1 << 100
"""Larger than any number in a file that memfit writes. The bytes of a plan that does not fit are well below."""

_UNITS = {
    "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a size such as "6GiB", "800 MiB" or "24GB" into bytes (binary units with an i, decimal units without).

    Raises UsageError for anything else, including a bare number, whose unit would be a guess, and a size that no machine has.
    """
    shown = repr(text if len(text) <= 40 else f"{text[:20]}...{text[-8:]}")
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"a size of {shown}",
            found="it is not a number followed by a unit",
            next_move="write it like '6GiB', '800MiB' or '24GB'",
        )
    size = float(found[1]) * _UNITS[found[2].lower()]
    if size >= BEYOND:
        raise UsageError(f"a size of {shown}", found="no machine has that much", next_move="write it like '6GiB' or '2TiB'")
    return int(size)


def is_readable(number: int | float) -> bool:
    """Whether a number from a file can be valid: finite, and small enough to display."""
    return -_READABLE < number < _READABLE  # false for NaN, too


def format_bytes(count: int | float) -> str:
    """Format a size with three significant digits in binary units ("34.1 GiB")."""
    sign, size = ("-" if count < 0 else ""), abs(count)
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if size >= unit * 0.9995:
            return f"{sign}{_three_digits(size / unit)} {name}"
    return f"{sign}{int(size)} B"


def format_at_least(count: int) -> str:
    """Format a size, rounded up: the text never stands for fewer bytes than `count` ("34.2 GiB" for 34.11 GiB)."""
    words, size = format_bytes(count), count
    while parse_bytes(words) < count:
        size += max(1, size // 2000)
        words = format_bytes(size)
    return words


def format_range(low: int, high: int) -> str:
    """Format a range of sizes ("164 to 232 MiB"), or a single size if both format the same."""
    first, last = format_bytes(low), format_bytes(high)
    if first == last:
        return last
    number, _, unit = first.rpartition(" ")
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


def format_seconds(seconds: float) -> str:
    """Format a duration: "4.10 s", "38.0 ms", "12 min 5 s"."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 1:
        return f"{_three_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def format_count(count: int | float) -> str:
    """Format a count: "124 M", "8.03 B", "950"."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= unit:
            return f"{_three_digits(count / unit)} {name}"
    return f"{count:g}"


def format_flops(count: float) -> str:
    """Format a number of floating-point operations: "15.8 G", "1.20 T"."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{_three_digits(count / unit)} {name}"
    return f"{count:g}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def unit_for(sizes: Iterable[int]) -> tuple[int, str]:
    """Return (bytes per unit, unit name) for these sizes: the largest unit that leaves two digits before the decimal point."""
    largest = max((abs(size) for size in sizes), default=0)
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if largest >= 10 * unit:
            return unit, name
    return (MiB, "MiB") if largest >= MiB else (1, "B")


def alike(*sizes: int) -> tuple[str, ...]:
    """Format sizes for comparison, all in one unit: "315 MiB", "1,024 MiB"."""
    unit, name = unit_for(sizes)
    return tuple(f"{in_unit(size, unit)} {name}" for size in sizes)


def in_unit(size: int, unit: int) -> str:
    """Format a size in a unit, without the unit's name. Bytes and zero have no decimals."""
    return f"{size:,}" if unit == 1 or not size else three_digits(size / unit)


def three_digits(value: float) -> str:
    """Format a number with about three significant digits: "2,918", "34.1", "0.38"."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def count(number: int, what: str) -> str:
    """Format a count with its noun: "1 block", "3 blocks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
