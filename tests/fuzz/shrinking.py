"""A finding made small: choices put back to the simplest while the outcome stays of its kind."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.grammar import OPTIONS, SIMPLEST, Choices, others, settled
from fuzz.outcomes import Outcome, outcome
from fuzz.script import steps_by_itself


def shrunk(
    choices: Choices, found: Outcome, *, step: bool, patience: int = 60, run: Callable[[Choices], Outcome] | None = None
) -> tuple[Choices, Outcome]:
    """The simplest choices whose script comes to the same kind of outcome (crashes and refusals: in the same words). `run`: how
    a script is run, if not in this process alone."""
    run = run or (lambda choices: outcome(choices, step=step))
    best, left = choices, patience
    progress = True
    while progress and left > 0:
        progress = False
        for name in OPTIONS:
            if best[name] == SIMPLEST[name] or left <= 0:
                continue
            simpler = settled({**best, name: SIMPLEST[name]})
            if len(others(simpler)) >= len(others(best)) or (step and not steps_by_itself(simpler)):
                continue
            left -= 1
            now = run(simpler)
            if _same(now, found):
                best, found, progress = simpler, now, True
    return best, found


def _same(one: Outcome, other: Outcome) -> bool:
    if one.kind != other.kind:
        return False
    return one.kind == "different" or one.what == other.what
