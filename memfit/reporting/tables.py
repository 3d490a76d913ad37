"""Builds the tables of a report as cells of text, which each view lays out in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from memfit._units import format_bytes, format_seconds, in_unit, unit_for
from memfit.planning.plan import Option
from memfit.planning.search import NORMS
from memfit.planning.wording import FACTORS, of_median, reason, way
from memfit.reporting.colours import COLOURS
from memfit.reporting.facts import BlockCost, PhasePeak, RankFacts
from memfit.reporting.lines import not_equal
from memfit.reporting.pace import loader_share, not_run_yet, seconds_of, steady, typical_wait
from memfit.reporting.words import instead, more_bytes, more_seconds, percent

if TYPE_CHECKING:
    from memfit.reporting.report import Report

RANK_COLUMNS = (
    *("rank", "host", "device", "share", "micro-batch x steps", "blocks checkpointed", "precision"),
    *("budget", "held beside", "expected", "at most", "measured", "computing", "exchange", "out of memory"),
)
"""Columns of the table of ranks."""
MOST = 300
"""Maximum rows of a table; the rows beyond are only counted."""


@dataclass(frozen=True)
class Table:
    """Holds cells of text under a title."""

    title: str
    """What it shows."""
    columns: tuple[str, ...]
    """Headings."""
    rows: tuple[tuple[str, ...], ...]
    """Cells, one per column in each row."""
    numbers: frozenset[int] = frozenset()
    """Right-aligned columns."""
    marked: frozenset[int] = frozenset()
    """Highlighted rows."""
    note: str = ""
    """What the reader should know about the table."""


def tables(report: Report) -> tuple[Table, ...]:
    """Build all tables, without those that have no rows."""
    makers = (every_rank, phases, blocks, options, sizes, levers, waiting, events)
    return tuple(table for table in (make(report) for make in makers) if table.rows)


def every_rank(report: Report) -> Table:
    """Build the table of every rank's share, memory and time, side by side."""
    shown = report.every[:MOST]
    rows = tuple(map(_rank_row, shown))
    steps = max((each.steps for each in shown), default=0)
    note = (
        "Computing: seconds per step in micro-batches. Exchange: until all ranks have their gradients, and these are added "
        f"up. As of step {steps:,}." + _left_out(report.every)
    )
    numbers = frozenset(i for i, name in enumerate(RANK_COLUMNS) if name not in ("host", "device", "precision"))
    table = Table("Every rank", RANK_COLUMNS, rows, numbers, note=note)
    for column in ("host", "device", "blocks checkpointed", "precision", "out of memory"):  # dropped if they say nothing
        at = table.columns.index(column)
        found = {row[at] for row in table.rows}
        table = without(table, column) if found <= {"0", "-", "as the script"} or (at < 3 and len(found) < 2) else table
    return table


def _rank_row(each: RankFacts) -> tuple[str, ...]:
    plan = each.plan
    own = ("-",) * 4
    if plan is not None:
        precision = "as the script" if plan.precision == "off" else plan.precision
        own = (f"{plan.share:,}", f"{plan.micro_batch} x {plan.accumulation}", str(len(plan.checkpoint)), precision)
    known = (None,) * 3 if plan is None else (plan.held, plan.predicted.peak + plan.held, plan.predicted.upper + plan.held)
    sizes = ("-" if size is None else format_bytes(size) for size in (each.limit, *known, each.peak))
    seconds = ("-" if took is None else format_seconds(took) for took in (each.computing, each.exchange))
    return (str(each.rank), each.host, each.device, *own, *sizes, *seconds, str(each.ran_out))


def phases(report: Report) -> Table:
    """Build the table of memory by phase and category, at each phase's peak."""
    moments = () if report.curve is None else report.curve.moments
    there = {kind for moment in moments for kind, _ in moment.holds}
    kinds = tuple(kind for kind in COLOURS if kind in there)
    unit, name = unit_for([moment.total for moment in moments])
    rows = tuple(_phase_row(moment, kinds, unit) for moment in moments)
    fullest = max(range(len(moments)), key=lambda i: moments[i].total, default=0)
    table = Table(
        "Memory by phase",
        ("phase", *kinds, "together", "at"),
        rows,
        frozenset(range(1, len(kinds) + 2)),
        frozenset({fullest}),
        f"Each phase at its peak, in {name}.",
    )
    return table if any(moment.where for moment in moments) else without(table, "at")


def _phase_row(moment: PhasePeak, kinds: Sequence[str], unit: int) -> tuple[str, ...]:
    holds = dict(moment.holds)
    name = f"{moment.phase} {moment.micro_batch}" if moment.micro_batch else moment.phase
    cells = [f"{holds.get(kind, 0) / unit:.1f}" for kind in kinds]
    return (name, *cells, f"{moment.total / unit:.1f}", moment.where or "-")


def without(table: Table, column: str) -> Table:
    """Return the table without a column."""
    gone = table.columns.index(column)
    rows = tuple(row[:gone] + row[gone + 1 :] for row in table.rows)
    numbers = frozenset(i - (i > gone) for i in table.numbers if i != gone)
    return replace(table, columns=table.columns[:gone] + table.columns[gone + 1 :], rows=rows, numbers=numbers)


def blocks(report: Report) -> Table:
    """Build the table of what each block takes in one micro-batch."""
    shown = report.blocks[:MOST]
    rows = [_block_row(block) for block in shown]
    total = sum(block.kept for block in report.blocks)
    rows += [("together", format_bytes(total), "-", "-", "-")] if rows else []
    note = (
        f"One micro-batch of {report.plan.micro_batch}: bytes its forward saves for backward, the most that "
        "comes and goes, and what recomputing it would take per step (the price of checkpointing it)."
    )
    columns = ("block", "kept", "transient", "forward again", "checkpointed")
    table = Table("Memory by block", columns, tuple(rows), frozenset({1, 2, 3}), note=note + _left_out(report.blocks))
    return table if any(block.checkpointed for block in shown) else without(table, "checkpointed")


def _block_row(block: BlockCost) -> tuple[str, ...]:
    again = "-" if block.recompute is None else format_seconds(block.recompute)
    by = f"by {block.checkpointed}" if block.checkpointed else "-"
    return block.name or "outside the blocks", format_bytes(block.kept), format_bytes(block.transient), again, by


def options(report: Report) -> Table:
    """Build the table of the plans that were considered, and why they were not taken."""
    shown = report.plan.options[:MOST]
    note = "Memory is on the budget's scale: it includes what is held beside the training."
    note += f" These are {of_median(report.plan)}." if report.plan.by_size else ""
    if any(option.measured for option in shown):
        note += " Seconds marked * were measured while training; the others were timed while planning, and scaled to those."
    unit = unit_for([option.cost.upper + report.plan.held for option in shown])
    table = Table(
        "Plans considered",
        (FACTORS, "precision", "blocks checkpointed", "expected", "at most", "per step", "why not"),
        tuple(_option_row(option, report, unit) for option in shown),
        frozenset({2, 3, 4, 5}),
        frozenset(i for i, option in enumerate(shown) if not option.reason),
        note + _left_out(report.plan.options),
    )
    return table if any(option.precision != "off" for option in shown) else without(table, "precision")


def _option_row(option: Option, report: Report, unit: tuple[int, str]) -> tuple[str, ...]:
    seconds, held = seconds_of(option, report), report.plan.held
    words = "-" if seconds is None else format_seconds(seconds)
    return (
        f"{option.micro_batch} x {option.accumulation}",
        "as the script" if option.precision == "off" else option.precision,
        str(option.checkpoint),
        *(f"{in_unit(size + held, unit[0])} {unit[1]}" for size in (option.cost.peak, option.cost.upper)),
        f"{words} *" if option.measured else words,
        reason(option, report.plan) or "this is the plan",
    )


def sizes(report: Report) -> Table:
    """Build the table of micro-batch sizes by sample size, if samples differ in size."""
    rows = tuple(tuple(f"{number:,}" for number in entry) for entry in report.plan.by_size)
    columns = ("elements of the largest sample, up to", "samples per micro-batch", "that would fit")
    note = "Samples are ordered by size within the batch; a micro-batch is as long as its largest sample."
    return Table("Micro-batches by size of sample", columns, rows, frozenset({0, 1, 2}), note=note)


def levers(report: Report) -> Table:
    """Build the table of one step of each lever, up and down."""
    rows = []
    for offer in report.offers:
        what = f"{way(offer)} ({offer.block})" if offer.block else instead(offer, report.plan)
        fits = f"no, {format_bytes(offer.missing)} missing" if offer.missing else "yes"
        rows.append((offer.lever, what, more_bytes(offer.more), more_seconds(offer.seconds), fits))
    columns = ("lever", "instead", "memory", "per step", "fits")
    note = "Against the plan: memory by the upper bound, seconds per step as predicted."
    return Table("One step of each lever", columns, tuple(rows), frozenset({2, 3}), note=note)


def waiting(report: Report) -> Table:
    """Build the table of the time per step spent computing and waiting for the loader."""
    share = loader_share(report)
    if share is None:
        return Table("What the run waits for", (), ())
    computing, loader = format_seconds(median(steady(report))), format_seconds(typical_wait(report.pace))
    rows = (("computing", computing, percent(1 - share)), ("the loader", loader, percent(share)))
    return Table("What the run waits for", ("for", "per step", "share"), rows, frozenset({1, 2}), note="Medians.")


def events(report: Report) -> Table:
    """Build the table of the run's events, the latest first."""
    latest = report.events[::-1][:MOST]
    rows = tuple((f"{event.step:,}", event.kind, event.message) for event in latest)
    table = Table("So far", ("step", "kind", "what"), rows, frozenset({0}), note="The latest first." + _left_out(report.events))
    return without(table, "step") if not_run_yet(report) else table


def notes(report: Report) -> Iterator[str]:
    """Yield what the reader should know about the numbers."""
    said = {NORMS, *not_equal(report)}  # shown above the notes
    yield from (note for note in dict.fromkeys((*report.notes, *report.allowance.notes)) if note not in said)
    if report.curve is None and report.plan.by_size:
        yield "memory over one step is not drawn: it varies with the samples' sizes"


def _left_out(rows: Sequence[object]) -> str:
    return f" {len(rows) - MOST:,} more are in the JSON." if len(rows) > MOST else ""
