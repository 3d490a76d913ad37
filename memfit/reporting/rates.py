"""Says in words what a changed batch size may mean for the learning rate: two published scaling rules.

Advice only: nothing is changed. Both rules assume losses that are means over the batch. Not covered: warm-up, schedules and
weight decay, and how far a rule holds, which only training shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memfit.reporting.facts import BatchChange
from memfit.reporting.words import listed

LINEAR = "linear rule (Goyal et al. 2017, arXiv:1706.02677, for SGD)"
ROOT = "square-root rule (Krizhevsky 2014, arXiv:1404.5997"
ROOT_ADAPTIVE = f"{ROOT}; for Adam and RMSprop Malladi et al. 2022, arXiv:2205.10287)"
MOMENTS = {"adam": "1 - beta1 and 1 - beta2", "rmsprop": "1 - alpha"}
"""What else the square-root rule multiplies, by a part of the optimizer's name."""


def batch_change(before: int | None, now: int | None, groups: Iterable[Mapping[str, Any]]) -> BatchChange | None:
    """Return the change from a script's `before` samples per optimizer step to `now`, with the learning rates of the
    optimizer's parameter groups; None if nothing changed or either number is not known."""
    if not before or not now or before == now:
        return None
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    return BatchChange(before, now, tuple(dict.fromkeys(rate for rate in rates if math.isfinite(rate))))


def rate_rules(change: BatchChange | None, optimizer: str) -> Iterator[str]:
    """Yield what the two rules say, the one for this kind of optimizer first; nothing if the batch is the script's."""
    if change is None:
        return
    yield (
        f"{change.now:,} samples per step, not the {change.before:,} that the script asked for: rules of thumb, "
        "for you to decide; memfit changed no learning rate"
    )
    moments = next((words for part, words in MOMENTS.items() if part in optimizer.lower()), "")
    linear, root = (_rule(name, factor, change.rates) for name, factor in _factors(change))
    if not moments:
        yield from (linear, root)
        return
    yield f"{root}; with {moments} times {_short(change.factor)} and eps divided by {_short(math.sqrt(change.factor))}"
    yield linear


def _factors(change: BatchChange) -> tuple[tuple[str, float], tuple[str, float]]:
    return (LINEAR, change.factor), (ROOT_ADAPTIVE, math.sqrt(change.factor))


def _rule(name: str, factor: float, rates: tuple[float, ...]) -> str:
    values = listed([f"{_short(rate)} -> {_short(rate * factor)}" for rate in rates])
    return f"{name}: times {_short(factor)}{', ' if values else ''}{values}"


def _short(number: float) -> str:
    return f"{number:.3g}"
