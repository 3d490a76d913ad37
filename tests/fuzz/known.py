"""What the fuzzer is known to find: options whose scripts still differ, crash or are refused without need, and why."""

from __future__ import annotations

from fuzz.grammar import Choices

KNOWN: dict[str, str] = {
}
"""By "dimension=option" or "dimension=option|option", several of them with spaces between where it takes all; the list is to become empty."""


def known(choices: Choices) -> bool:
    """Whether a script has what is in the list."""
    return any(all(choices[name] in options for name, options in parts(entry)) for entry in KNOWN)


def parts(entry: str) -> list[tuple[str, list[str]]]:
    """The dimensions that an entry names, each with the options it means."""
    named = [part.split("=") for part in entry.split()]
    return [(name, options.split("|")) for name, options in named]
