"""Formats numbers and names for people, the same in every view.

Not covered: what a format needs beyond that (escaping is done where the format is known).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from memfit._units import format_bytes, format_seconds, three_digits
from memfit.planning.plan import Plan
from memfit.planning.search import NEARLY
from memfit.planning.wording import sentence
from memfit.reporting.facts import Offer


def printable(text: str) -> str:
    """Return the text on one line, with escape codes for characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def alike_seconds(*durations: float) -> tuple[str, ...]:
    """Format durations to be compared in one unit: "0.94 s", "4.10 s"."""
    longest = max(durations, default=0.0)
    if longest >= 120:
        return tuple(map(format_seconds, durations))
    unit, name = (1.0, "s") if longest >= 1 else (1e-3, "ms") if longest >= 1e-3 else (1e-6, "us")
    return tuple(f"{three_digits(seconds / unit)} {name}" for seconds in durations)


def relative(error: float) -> str:
    """Format a relative difference: "3e-8", "1.5e-7", "0"."""
    if not math.isfinite(error) or error == 0:
        return f"{error:g}"
    digits, _, power = f"{error:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def less_or_more(count: int) -> str:
    """Format a difference in bytes in words: "41.0 MiB less"."""
    return "as much memory" if not count else f"{format_bytes(abs(count))} {'more' if count > 0 else 'less'}"


def more_bytes(count: int) -> str:
    """Format a difference in bytes with its sign."""
    return f"+{format_bytes(count)}" if count > 0 else format_bytes(count)


def more_seconds(seconds: float | None) -> str:
    """Format a difference in seconds with its sign; "-" if not known."""
    if seconds is None:
        return "-"
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def percent(share: float) -> str:
    """Format a fraction as a percentage: "3 %"."""
    digits = 1 if 0 < abs(share) < 0.0995 else 0
    return f"{share * 100:.{digits}f}".removesuffix(".0") + " %"


def speed(seconds: float, than: float) -> str:
    """Say how one duration compares with another: "3 % faster"."""
    if than <= 0 or abs(seconds / than - 1) < NEARLY - 1:
        return "as fast"
    return f"{percent(1 - seconds / than)} faster" if seconds < than else f"{percent(seconds / than - 1)} slower"


def instead(offer: Offer, plan: Plan) -> str:
    """Describe another way of running the step, against a plan."""
    return f"{sentence(offer, plan.share)}{', no block checkpointed' if plan.checkpoint and not offer.checkpoint else ''}"


def blocks_listed(names: Sequence[str]) -> str:
    """List names of blocks, consecutive numbers together: "transformer.h.0 to 5"."""
    runs: list[tuple[str, int, int]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        at = int(number) if number.isdecimal() else -1
        if runs and at > 0 and runs[-1][0] == stem and runs[-1][2] == at - 1:
            runs[-1] = (stem, runs[-1][1], at)
        else:
            runs.append((stem if at >= 0 else name, at, at))
    return listed([stem if first < 0 else _numbered(stem, first, last) for stem, first, last in runs])


def _numbered(stem: str, first: int, last: int) -> str:
    numbers = f"{first} to {last}" if last > first else str(first)
    return f"{stem}.{numbers}" if stem else numbers


def listed(names: Sequence[str], most: int = 4) -> str:
    """List up to `most` of the names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def made_with(made: str, packages: Sequence[tuple[str, str]]) -> str:
    """Say in words when and with what a report was made."""
    versions = ", ".join(f"{package} {version}" for package, version in packages)
    return f"made {made}" + (f" with {versions}" if versions else "")
