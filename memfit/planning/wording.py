"""Describes a plan in words, the same everywhere: printed, on the command line, in reports, in events.

Every size is on the budget's scale: it includes what the process holds beside the training. So sizes can be compared with each
other and with the budget. Not covered: what only a report knows (what was measured, other levers).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from memfit._units import alike, count, format_bytes, format_range, format_seconds

if TYPE_CHECKING:
    from memfit.planning.plan import Option, Plan, RankPlan

MUCH_MORE = 1.05
"""The upper bound is shown too if it exceeds the expected peak by this factor."""
SHOWN = 6
"""Number of rejected options shown."""
FACTORS = "micro-batch x accumulation steps"
"""The meaning of the numbers in `way`."""
OWN_PRECISION = "gradients add up in the parameters' own precision"
"""The effect of accumulate_in="param"."""


class CutWords(Protocol):
    """What `micro_batches` describes: an effective batch split into micro-batches."""

    @property
    def micro_batch(self) -> int: ...
    @property
    def accumulation(self) -> int: ...


class WayWords(CutWords, Protocol):
    """What `way` describes: a split with its checkpointing and precision."""

    @property
    def checkpoint(self) -> int: ...
    @property
    def precision(self) -> str: ...


def told(plan: Plan) -> str:
    """Return a plan's full description, as several lines."""
    lines = [f"memfit plan for {plan.model} with {plan.optimizer} on {plan.device}", f"  {summary(plan)}"]
    lines += [f"  {_of_rank(each)}" for each in plan.ranks]
    options = nearest(plan.rejected, plan.micro_batch)
    lines += [f"  not taken ({FACTORS}{_of_which(plan)}):"] if options else []
    lines += [f"    {_option(option, plan)}" for option in options]
    lines += [f"    and {len(plan.rejected) - len(options)} more"] if len(plan.rejected) > len(options) else []
    return "\n".join([*lines, *(f"  note: {note}" for note in plan.notes)])


def _of_rank(each: RankPlan) -> str:
    """What one rank of several runs."""
    levers = [f"{count(len(each.checkpoint), 'block')} checkpointed"] if each.checkpoint else []
    levers += [each.precision] if each.precision != "off" else []
    with_levers = f" ({', '.join(levers)})" if levers else ""
    memory = f"{format_bytes(each.predicted.peak + each.held)} of {format_bytes(each.limit)} on {each.device}"
    return f"rank {each.rank}: {each.share:,} in {micro_batches(each, each.share)}{with_levers}, {memory}"


def summary(plan: Plan) -> str:
    """Return one line that says what runs, and its memory and time."""
    levers = [f"{count(len(plan.checkpoint), 'block')} checkpointed"] if plan.checkpoint else []
    levers += [plan.precision] if plan.precision != "off" else []
    levers += [OWN_PRECISION] if plan.accumulate_in == "param" else []
    with_levers = f" ({', '.join(levers)})" if levers else ""
    mode = ", two passes" if plan.mode == "replay" else ""
    memory = f"{peak(plan)} of {format_bytes(plan.limit)}"
    seconds = "" if plan.predicted.seconds is None else f", {format_seconds(plan.predicted.seconds)} per step"
    more = f"{plan.target_batch:,}, of which " if (plan.target_batch or plan.share) != plan.share else ""
    return f"batch {more}{cut(plan)}{with_levers}{mode}: {memory}{seconds}"


def cut(plan: Plan) -> str:
    """Return how a share is split: "512 in 4 micro-batches of 128"."""
    if plan.runs_whole:
        return f"{plan.share:,} whole"
    if plan.by_size:
        sizes = [min(samples, plan.share) for _, samples, _ in plan.by_size]
        among = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{sizes[0]:,}"
        return f"{plan.share:,} in micro-batches of {among}, by size of sample"
    return f"{plan.share:,} in {micro_batches(plan, plan.share)}"


def micro_batches(option: CutWords, share: int) -> str:
    """Return number and size: "4 micro-batches of 128", "5 micro-batches of at most 103", "512 whole"."""
    if option.accumulation == 1:
        return f"{share:,} whole"
    most = "" if option.micro_batch * option.accumulation == share else "at most "
    return f"{option.accumulation:,} micro-batches of {most}{option.micro_batch:,}"


def peak(plan: Plan) -> str:
    """Return the expected peak in words, with the upper bound where that is much more."""
    expected, most = plan.predicted.peak + plan.held, plan.predicted.upper + plan.held
    return format_range(expected, most) if most > MUCH_MORE * expected else format_bytes(expected)


def way(option: WayWords) -> str:
    """Describe a way of running the step, with FACTORS as its numbers: "36 x 15, 4 blocks checkpointed, bfloat16"."""
    return ", ".join([f"{option.micro_batch} x {option.accumulation}", *_levers(option)])


def sentence(option: WayWords, share: int) -> str:
    """Describe it without a heading for the numbers: "15 micro-batches of 36, 4 blocks checkpointed, bfloat16"."""
    return ", ".join([micro_batches(option, share), *_levers(option)])


def _levers(option: WayWords) -> list[str]:
    found = [f"{count(option.checkpoint, 'block')} checkpointed"] if option.checkpoint else []
    return found + ([option.precision] if option.precision != "off" else [])


def reason(option: Option, plan: Plan) -> str:
    """Return why an option was rejected; "" for the plan itself."""
    if option.fits:
        return re.sub(r"(?<=\d)%", " %", option.reason)
    need, room = alike(option.cost.upper + plan.held, plan.limit - plan.margin)
    return f"needs up to {need}, {room} allowed"


def nearest(options: Sequence[Option], micro_batch: int, most: int = SHOWN) -> tuple[Option, ...]:
    """Return at most `most` options, those with the micro-batch closest to `micro_batch`, in their original order."""
    closest = sorted(options, key=lambda option: abs(math.log(option.micro_batch / micro_batch)))[:most]
    return tuple(option for option in options if option in closest)[:most]


def of_median(plan: Plan) -> str:
    """Return which samples the options apply to where samples differ in size; "" otherwise."""
    return f"for samples of the median size, {count(plan.median, 'element')}" if plan.by_size else ""


def _of_which(plan: Plan) -> str:
    return f"; {of_median(plan)}" if plan.by_size else ""


def _option(option: Option, plan: Plan) -> str:
    expected, most = alike(option.cost.peak + plan.held, option.cost.upper + plan.held)
    return f"{way(option)}: {expected} expected, {most} at most; {reason(option, plan)}"
