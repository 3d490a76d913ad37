"""A plan on a terminal, where there is no report: what it decided, and some of what it did not take.

For `memfit plan` and `memfit report plan.json`. Not covered: what was measured; a run's report has that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit._units import format_bytes, format_seconds
from memfit.planning.plan import Plan
from memfit.reporting.terminal import LABEL, grid, not_taken, without_colour
from memfit.reporting.words import alike, blocks_listed, count, printable

if TYPE_CHECKING:
    from rich.console import Console


def show_plan(plan: Plan) -> None:
    """Print the plan on stdout, in colour on a terminal."""
    from rich.console import Console

    _print(plan, Console(soft_wrap=False))


def plain_plan(plan: Plan, width: int | None = None) -> str:
    """The same as text without colours, as wide as the terminal or as said."""
    return without_colour(lambda console: _print(plan, console), width)


def _print(plan: Plan, console: Console) -> None:
    from rich.text import Text

    subject = f"{plan.model}, {plan.optimizer}, on {plan.device}"
    console.print(Text.assemble(("memfit plan", "bold"), "  ", printable(subject)))
    console.print()
    table = grid()
    table.add_column(style="dim", no_wrap=True, min_width=LABEL)
    table.add_column(overflow="fold")
    for label, line in lines(plan):
        table.add_row(label, Text(printable(line)))
    console.print(table)
    if plan.rejected:
        console.print()
        console.print(not_taken(plan, console.width))


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """(label, words) of what the plan says."""
    expected, most = alike(plan.predicted.peak + plan.held, plan.predicted.upper + plan.held)
    yield "batch", _batch(plan)
    yield "memory", f"{expected} expected, {most} at most"
    yield "", f"the whole batch at once would need {format_bytes(plan.asked.peak + plan.held)}"
    free = f", {format_bytes(plan.margin)} of it kept free" if plan.margin else ""
    yield "budget", f"{format_bytes(plan.limit)}{free}"
    if plan.predicted.seconds is not None:
        yield "per step", format_seconds(plan.predicted.seconds)
    blocks = f"{count(len(plan.checkpoint), 'block')}: {blocks_listed(plan.checkpoint)}" if plan.checkpoint else "none"
    yield "checkpoint", blocks
    yield "precision", "the script's own" if plan.precision == "off" else plan.precision
    for elements, samples, fit in plan.by_size:
        yield "", f"samples of up to {elements:,} elements: {samples:,} per micro-batch ({fit:,} would fit)"
    for note in plan.notes:
        yield "note", note


def _batch(plan: Plan) -> str:
    passes = ", in two passes because the loss needs the whole output" if plan.mode == "replay" else ""
    total = "" if plan.target_batch in (None, plan.share) else f" of {plan.target_batch:,}"
    if plan.by_size:
        return f"{plan.share:,}{total} in micro-batches by size of sample{passes}"
    if plan.accumulation == 1:
        return f"{plan.share:,}{total} whole{passes}"
    exact = plan.micro_batch * plan.accumulation == plan.share
    product = f"{'=' if exact else 'as'} {plan.micro_batch} x {plan.accumulation}"
    return f"{plan.share:,}{total} {product}   micro{'' if exact else ' (at most)'} x accumulation{passes}"
