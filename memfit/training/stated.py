"""What every process says of its part of a step, in numbers, and what all of them make of it, the same on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit._errors import Refused
from memfit.engine.handover import Factor

MOST_RIVALS = 6
"""Counts that are compared between processes; there are seldom two."""
ABOUT = 15
STATED = ABOUT + 2 * MOST_RIVALS
"""Numbers that every process states of a step before those about its parameters."""
EXACT = 1e-9
"""Relative difference up to which counts are in proportion: rounding."""
NOTHING, EITHER = -2.0, -1.0
"""Stand for what a sum divides by: nothing; and for one sample, nothing or the number of samples."""
BITS = 48
"""Answers that one number carries: what a double holds exactly."""


@dataclass(frozen=True)
class Stated:
    """What one process says of its part of a step."""

    number: int
    """The steps it has done."""
    weight: float
    """What its part weighs; not a number where that is known on the device alone."""
    value: float
    """Its loss; likewise."""
    way: int | None
    """How its losses are weighted; None where the part weighs nothing, which is so in any way."""
    digest: float
    """What its parameters come to, where that is looked at in this step."""
    samples: float
    """What it weighs by samples."""
    divided: bool
    """Whether the script divides its sum by that."""
    torn: bool
    """Whether its latest optimizer step was left halfway."""
    whole: bool
    """Whether its loss takes all samples of its share together."""
    unseen: bool
    """Whether memfit does not see what its loss computes from the outputs."""
    ready: bool
    """Whether its gradients can be reduced beside its last micro-batch: in this step, or in one like it."""
    worked: bool
    """Whether its part of the sums beside the last micro-batch was right; True where there were none."""
    paces: tuple[float, float]
    """Seconds of its steps with such sums and without; zeros where that is not known."""
    incoming: float
    """The gradient of the loss that its backward came with; not a number where that was not looked at."""
    rivals: dict[int, float]
    """What it would weigh in other ways that hold on it."""
    reached: tuple[bool, ...]
    """Which parameters received gradients."""


def packed(answers: Sequence[bool]) -> list[float]:
    """Many answers in few numbers."""
    parts = (answers[i : i + BITS] for i in range(0, len(answers), BITS))
    return [float(sum(answer << bit for bit, answer in enumerate(part))) for part in parts]


def unpacked(numbers: Sequence[float], count: int) -> tuple[bool, ...]:
    """What `packed` made of so many answers."""
    return tuple(bool(int(number) >> bit & 1) for number in numbers for bit in range(BITS))[:count]


def stated(numbers: Sequence[float], parameters: int) -> Stated:
    """One process's numbers, read."""
    step, weight, value, way, digest, samples, divided, torn, *more = numbers[:ABOUT]
    whole, unseen, ready, worked, beside, after, incoming = more
    pairs = zip(numbers[ABOUT:STATED:2], numbers[ABOUT + 1 : STATED : 2])
    return Stated(
        number=int(step),
        weight=weight,
        value=value,
        way=int(way) if weight else None,
        digest=digest,
        samples=samples if weight else 0.0,
        divided=bool(divided),
        torn=bool(torn),
        whole=bool(whole),
        unseen=bool(unseen),
        ready=bool(ready),
        worked=bool(worked),
        paces=(beside, after),
        incoming=incoming,
        rivals={int(code): count for code, count in pairs if code},
        reached=unpacked(numbers[STATED:], parameters),
    )


def is_mean(told: Sequence[Stated]) -> bool:
    """Whether sums are divided by the samples in them, as far as can be seen: a single sample is divided by one."""
    counting = [each for each in told if each.way is not None]
    return all(each.divided for each in counting) and any(each.samples > 1 for each in counting)


def are_apart(told: Sequence[Stated]) -> bool:
    """Whether processes multiply their losses by different numbers, other than by one over their samples."""
    incoming = {each.incoming for each in told if each.way is not None and not math.isnan(each.incoming)}
    return len(incoming) > 1 and not is_mean(told)


def share_of(told: Sequence[Stated], rank: int, *, summed: bool, mean: bool, in_parts: bool = False) -> float:
    """What a process's gradients have to be multiplied by, where all weights are known on the host. `mean`: sums are divided by
    the number of processes; `in_parts`: they are sums over all processes already, divided by its own weight if it has any."""
    if summed and not is_mean(told):
        return 1.0 / len(told) if mean else 1.0
    weights = [each.samples if summed else each.weight for each in told]
    whole = sum(weights)
    return (weights[rank] or float(in_parts)) / whole if whole else 0.0


def check_rivals(told: Sequence[Stated]) -> None:
    """Raise Refused where another way of weighting holds on every process by itself, or for a term of the loss, and would weigh
    them differently: no process alone could tell which is right."""
    ways = set[int]().union(*(each.rivals for each in told))
    for way in ways:
        ratios = [each.rivals[way] / each.weight for each in told if not math.isnan(each.rivals.get(way, math.nan))]
        if len(ratios) == len(told) and max(ratios) - min(ratios) > EXACT * max(ratios):
            raise Refused(
                "one loss over all processes",
                found="what it, or a term of it, may be divided by (valid labels, a mask) is in proportion to the samples of "
                "each process by itself, and not over all of them",
                next_move="say by weight= what a part of a batch counts, or give every process more samples of each batch; "
                "where one term of several is meant, divide each by what all processes count",
            )


def divisor_of(told: Sequence[float]) -> float | None:
    """What a term of the loss divides by over all processes, from what it does on each: not a number where there are no
    samples. None: by nothing."""
    known = [number for number in told if not math.isnan(number)]
    if NOTHING in known or all(number == EITHER for number in known):
        return None
    return sum(1.0 if number == EITHER else number for number in known)


def upstream_of(told: Sequence[Stated], rank: int) -> float:
    """What gradients are multiplied by that go on to where inputs were computed: other models weigh processes by their samples
    once more, and so does DistributedDataParallel."""
    own = told[rank].samples
    return sum(each.samples for each in told) / own if own else 1.0


def number_of(value: Factor) -> float:
    """A number that lies on the host, without asking torch for it as of a device."""
    return float(value.detach().numpy()) if isinstance(value, torch.Tensor) else float(value)
