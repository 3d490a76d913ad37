"""What every rank reports of its part of a step, as numbers, and what follows from these, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from memfit._errors import Refused
from memfit.capture.expression import EITHER, NOTHING
from memfit.engine.handover import Factor

MOST_RIVALS = 6
"""Maximum number of counts compared between ranks; there are seldom two."""
ABOUT = 16
STATED = ABOUT + 2 * MOST_RIVALS
"""Numbers that every rank reports of a step before those about its parameters."""
EXACT = 1e-9
"""Relative tolerance for proportional counts: rounding."""
APART = 1e-6
"""Relative difference of the sums of their parameters above which ranks count as different."""
BITS = 48
"""Booleans per number: what a float64 holds exactly."""


class RankReporter(Protocol):
    """What the ranks tell each other about themselves, in the exchange that ends a step."""

    def stated(self) -> list[float]:
        """Return what this rank states about itself."""
        ...

    def heard(self, told: Sequence[Sequence[float]], step: int) -> None:
        """Process what all ranks stated in a step."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Context manager for waits on other ranks during micro-batches."""
        ...


@dataclass(frozen=True)
class Stated:
    """One rank's report of its part of a step."""

    number: int
    """Steps done."""
    weight: float
    """Weight of its part; NaN if known only on the device."""
    value: float
    """Its loss; NaN if known only on the device."""
    way: int | None
    """How its losses are weighted; None if its weight is 0, which fits any way."""
    digest: float
    """Checksum of its parameters, in steps that compare them."""
    samples: float
    """Its weight by samples."""
    divided: bool
    """Whether the script divides its sum by that."""
    torn: bool
    """Whether its latest optimizer step was interrupted."""
    whole: bool
    """Whether its loss needs all samples of its share together."""
    unseen: bool
    """Whether memfit does not see what its loss computes from the outputs."""
    ready: bool
    """Whether its gradient reduction can overlap its last micro-batch, in this step or a similar one."""
    worked: bool
    """Whether its part of the overlapped reduction was right; True without one."""
    paces: tuple[float, float]
    """Seconds of its steps with overlap and without; zeros if unknown."""
    incoming: float
    """Incoming gradient of its loss; NaN if not read."""
    calls: int
    """How many of the script's calls its part is of; 0 if nobody said."""
    rivals: dict[int, float]
    """Its weights by other ways of weighting that hold on it."""
    reached: tuple[bool, ...]
    """Which parameters received gradients."""

    def by_samples(self, code: int) -> Stated:
        """Return this report with its part weighted by samples, which is the way `code`."""
        known = self.way in (None, code)
        return replace(self, way=code, weight=self.weight if known else self.samples, rivals={})


def packed(answers: Sequence[bool]) -> list[float]:
    """Pack many booleans into few numbers, as bit masks."""
    parts = (answers[i : i + BITS] for i in range(0, len(answers), BITS))
    return [float(sum(answer << bit for bit, answer in enumerate(part))) for part in parts]


def unpacked(numbers: Sequence[float], count: int) -> tuple[bool, ...]:
    """Unpack `count` booleans packed by `packed`."""
    return tuple(bool(int(number) >> bit & 1) for number in numbers for bit in range(BITS))[:count]


def stated(numbers: Sequence[float], parameters: int) -> Stated:
    """Parse one rank's numbers."""
    step, weight, value, way, digest, samples, divided, torn, *more = numbers[:ABOUT]
    whole, unseen, ready, worked, beside, after, incoming, calls = more
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
        calls=int(calls),
        rivals={int(code): count for code, count in pairs if code},
        reached=unpacked(numbers[STATED:], parameters),
    )


def is_mean(told: Sequence[Stated]) -> bool:
    """Whether sums are divided by their samples, as far as can be seen: a single sample is divided by one."""
    counting = [each for each in told if each.way is not None]
    return all(each.divided for each in counting) and any(each.samples > 1 for each in counting)


def are_apart(told: Sequence[Stated]) -> bool:
    """Whether ranks multiply their losses by different numbers, other than one over their samples."""
    incoming = {each.incoming for each in told if each.way is not None and not math.isnan(each.incoming)}
    return len(incoming) > 1 and not is_mean(told)


def share_of(told: Sequence[Stated], rank: int, *, summed: bool, mean: bool, in_parts: bool = False) -> float:
    """Return the factor of a rank's gradients if all weights are known on the host. `mean`: the reduction divides by the
    number of ranks; `in_parts`: gradients are sharded, thus already summed across ranks, and divided by the rank's own weight
    if it has one."""
    if summed and not is_mean(told):
        return 1.0 / len(told) if mean else 1.0
    weights = [each.samples if summed else each.weight for each in told]
    whole = sum(weights)
    return (weights[rank] or float(in_parts)) / whole if whole else 0.0


def check_same_step(told: Sequence[Stated]) -> None:
    """Raise Refused if the ranks are at different steps, run different calls or have different parameters."""
    numbers = [each.number for each in told]
    if len(set(numbers)) > 1:
        raise Refused(
            "a training step over all processes",
            found=f"their step counts differ: {', '.join(map(str, numbers))} by rank",
            next_move="call backward (or run.step) equally often on every process",
        )
    calls = [each.calls for each in told]
    if len({each for each in calls if each}) > 1:
        raise Refused(
            "one loss of several calls over all processes",
            found=f"their processes run {', '.join(map(str, calls))} of the calls together, by rank: some saw what the "
            "forward moves, which one sample cannot show",
            next_move="give every process at least two samples of each batch, or pass loss_fn= to memfit.wrap",
        )
    torn = [str(rank) for rank, each in enumerate(told) if each.torn]
    if torn:
        raise Refused(
            "training one model over all processes",
            found=f"optimizer.step() failed on rank {', '.join(torn)} after {numbers[0]} steps, and the script went on: "
            "parameters there may be partly updated",
            next_move="let the error end the script and resume from the last saved state",
        )
    digests = [each.digest for each in told]
    if max(digests) - min(digests) > APART * max(1.0, *map(abs, digests)):
        raise Refused(
            "training one model over all processes",
            found=f"after {numbers[0]} steps its parameters are not the same everywhere: some received gradients that were "
            "not reduced (through own methods of the model, or submodules, called from outside), or other updates",
            next_move="call the model itself; its forward may call those methods",
        )


def check_rivals(told: Sequence[Stated]) -> None:
    """Raise Refused if another way of weighting holds on every rank by itself, or for a term of the loss, and would weight the
    ranks differently. No rank alone could tell which is right."""
    ways = set[int]().union(*(each.rivals for each in told))
    for way in ways:
        ratios = [each.rivals[way] / each.weight for each in told if not math.isnan(each.rivals.get(way, math.nan))]
        if len(ratios) == len(told) and max(ratios) - min(ratios) > EXACT * max(ratios):
            raise Refused(
                "one loss over all processes",
                found="a possible denominator of it, or of a term of it (valid labels, a mask), is proportional to the samples "
                "on each process, but not over all of them",
                next_move="pass weight= (the denominator of each part), or give every process more samples of each batch; "
                "if one of several terms is meant, divide each by the count of all processes",
            )


def divisor_of(told: Sequence[float]) -> float | None:
    """Return the divisor of a loss term across all ranks, given that of each rank (NaN without samples). None: no divisor."""
    known = [number for number in told if not math.isnan(number)]
    if NOTHING in known or all(number == EITHER for number in known):
        return None
    return sum(1.0 if number == EITHER else number for number in known)


def upstream_of(told: Sequence[Stated], rank: int) -> float:
    """Return the factor for gradients that flow on into computed inputs. Models there weight ranks by samples once more, as
    does DistributedDataParallel."""
    own = told[rank].samples
    return sum(each.samples for each in told) / own if own else 1.0


def number_of(value: Factor) -> float:
    """Return a number on the host, without a read by torch that would count as a synchronization."""
    return float(value.detach().numpy()) if isinstance(value, torch.Tensor) else float(value)
