"""What tests ask of many scripts: that none differs, crashes or is refused without need."""

from __future__ import annotations

from collections.abc import Iterable

from fuzz.grammar import drawn
from fuzz.outcomes import BAD
from fuzz.pool import Found, found_in, modes_of, outcomes_of
from fuzz.reporting import small

SHRUNK = 3
"""Offenders that are told as small scripts."""


def offenders(seeds: Iterable[int]) -> list[Found]:
    """What differed, crashed or was refused without need, each script in one of its modes by turns."""
    found = []
    for seed in seeds:
        choices = drawn(seed)
        possible = modes_of(choices)
        chosen = (possible[seed % len(possible)],)
        found += [Found(seed, mode, one.kind, one.what, one.detail) for mode, one in outcomes_of(choices, chosen) if one.bad]
    return found


def offenders_apart(seeds: Iterable[int]) -> list[Found]:
    """The same of many scripts, in all their modes. Processes of their own run them: one alone becomes slower and slower."""
    return [one for one in found_in(seeds) if one.kind in BAD]


def told(found: list[Found]) -> str:
    """Offenders by their seeds, the first of them as small scripts."""
    lines = [f"seed {one.seed}, {one.mode} mode: {one.kind}: {one.what}" for one in found]
    return "\n".join([*lines, *(small(one, patience=30) for one in found[:SHRUNK])])
