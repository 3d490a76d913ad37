"""What many seeds came to, as a table, and findings as scripts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fuzz.grammar import drawn, others
from fuzz.outcomes import BAD, CRASHED, DIFFERENT, FREE, INEXACT, INVALID, REFUSED, TWICE, UNSTEADY, UNTRUE, WHOLE, Outcome
from fuzz.pool import Found
from fuzz.script import source_of
from fuzz.shrinking import shrunk

ORDER = (FREE, TWICE, WHOLE, INEXACT, REFUSED, UNTRUE, DIFFERENT, CRASHED, UNSTEADY, INVALID)
SAID = {
    FREE: "equal and free: one pass",
    TWICE: "equal by two passes",
    WHOLE: "equal, run whole",
    INEXACT: "not equal, and reported (batch statistics)",
    REFUSED: "refused, and cutting by hand differs",
    UNTRUE: "refused, though cutting by hand is equal or nothing was to be cut",
    DIFFERENT: "different",
    CRASHED: "crashed",
    UNSTEADY: "left out: plain differs as much from parameters that differ in their last digit",
    INVALID: "left out: plain raises",
}


def per_thousand(found: Sequence[Found]) -> str:
    """The table of outcomes."""
    counts = Counter(one.kind for one in found)
    runs = max(1, len(found) - counts[INVALID] - counts[UNSTEADY])
    lines = [f"{len({one.seed for one in found})} scripts, {len(found)} runs (script and step mode), per thousand:"]
    for kind in ORDER:
        modes = Counter(one.mode for one in found if one.kind == kind)
        each = ", ".join(f"{mode} {n}" for mode, n in sorted(modes.items()))
        lines.append(f"  {1000 * counts[kind] / runs:7.1f}  {SAID[kind]} ({each or 'none'})")
    return "\n".join(lines)


def causes(found: Iterable[Found], kinds: Sequence[str] = (*BAD, REFUSED, INVALID)) -> dict[tuple[str, str, str], list[Found]]:
    """Findings by kind, mode and words, the most frequent first."""
    groups: dict[tuple[str, str, str], list[Found]] = defaultdict(list)
    for one in found:
        if one.kind in kinds:
            groups[one.kind, one.mode, one.what].append(one)
    return dict(sorted(groups.items(), key=lambda item: (kinds.index(item[0][0]), -len(item[1]))))


def small(one: Found, *, patience: int = 60) -> str:
    """A finding as the simplest script that comes to the same."""
    step = one.mode == "step"
    choices, now = shrunk(drawn(one.seed), Outcome(one.kind, one.what, one.detail), step=step, patience=patience)
    head = f"seed {one.seed}, {one.mode} mode: {now.kind}: {now.what}\nchoices: {others(choices)}\n"
    return f"{head}{now.detail}\n----\n{source_of(choices, step=step)}"
