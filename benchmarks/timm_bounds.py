"""Bounds for the peaks of timm's models: found with half of the models, judged on the other half.

Split conformal prediction (Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005). The score of a row is what
is missing, as a share of the predicted bytes and a floor beside them: small steps are off by bytes and large ones by shares.
The floor of a kind of step is that of FLOORS with which the half that is known over-reserves least.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from common import MiB

LEVELS = (0.8, 0.9, 0.95, 0.975, 0.99)
"""Shares of the rows that a bound is to cover."""
TAKEN = 0.95
"""The one that `memfit/profiling/intervals.py` takes, and that floors are chosen for."""
FLOORS = tuple(n * MiB for n in (0, 512, 1024, 2048, 4096))
CONVOLUTIONAL = 0.1
"""Share of convolutions in the arithmetic from which on a step counts as such."""

Row = tuple[str, int, float, float]
"""Model, batch, measured bytes without the constant, predicted bytes."""


def bounds(rows: list[tuple[str, int, float, int]], constant: float, share: dict[str, float]) -> dict[str, Any]:
    """By kind of step: its floor and, by level, the bounds and how they did on the other half."""
    cleared = [(name, batch, size - constant, float(guess)) for name, batch, size, guess in rows]
    kinds = {
        "plain": [row for row in cleared if share[row[0]] <= CONVOLUTIONAL],
        "convolutions": [row for row in cleared if share[row[0]] > CONVOLUTIONAL],
    }
    return {kind: of_kind(part, constant) for kind, part in kinds.items() if part}


def of_kind(rows: list[Row], constant: float) -> dict[str, Any]:
    names = sorted({name for name, *_ in rows})
    known, judged = ([row for row in rows if row[0] in half] for half in (set(names[::2]), set(names[1::2])))
    if not judged:
        return {"rows": 0}
    floor = min(FLOORS, key=lambda f: over_reservation(known, f, quantile(known, f, TAKEN), constant))
    levels = {}
    for level in LEVELS:
        upper, lower = quantile(known, floor, level), -quantile(known, floor, level, below=True)
        levels[str(level)] = {
            "lower": max(0.0, lower),
            "upper": max(0.0, upper),
            "covered": mean_of(guess + upper * (guess + floor) >= size for *_, size, guess in judged),
            "above the lower bound": mean_of(guess - lower * (guess + floor) <= size for *_, size, guess in judged),
            "over-reservation, median": over_reservation(judged, floor, upper, constant),
        }
    return {"floor MiB": floor // MiB, "rows known": len(known), "rows judged": len(judged), "levels": levels}


def quantile(rows: list[Row], floor: int, level: float, *, below: bool = False) -> float:
    """The score that this share of further rows stays below (or above): the conformal rank, the last where rows are too few."""
    scores = sorted((size - guess) / (guess + floor) for *_, size, guess in rows)
    rank = min(len(scores), math.ceil((len(scores) + 1) * level)) - 1
    return scores[len(scores) - 1 - rank] if below else scores[rank]


def over_reservation(rows: list[Row], floor: int, upper: float, constant: float) -> float:
    return median((constant + guess + upper * (guess + floor)) / (constant + size) - 1 for *_, size, guess in rows)


def mean_of(hits: Any) -> float:
    found = list(hits)
    return sum(found) / len(found)
