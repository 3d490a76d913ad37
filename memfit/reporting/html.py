"""Renders the report as one HTML page that needs no network, and as a short form for notebooks.

Not covered: browsers without JavaScript show the tables but no charts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit._units import format_bytes, format_seconds
from memfit.reporting.charts import charts
from memfit.reporting.colours import COLOURS, MEANING, colour
from memfit.reporting.lines import answers, at_moment, comparison, headline, peak_holds, verdict
from memfit.reporting.pages import environment, rendered
from memfit.reporting.tables import MOST, Table, blocks, events, every_rank, levers, notes, options, phases, sizes, waiting

if TYPE_CHECKING:
    from memfit.reporting.report import Report


def page(report: Report) -> str:
    """Render the whole page, with the code of its charts inside."""
    drawn = charts(report)
    return rendered(
        "report.html.jinja",
        **_first_screen(report),
        title=f"memfit: {headline(report)}",
        charts=drawn,
        figures={name: chart.figure for name, chart in drawn.items()},
        tables=_tables(report),
        bars=block_bars(report),
        notes=list(notes(report)),
    )


def summary(report: Report) -> str:
    """Render only the first screen, for notebooks."""
    return environment().get_template("notebook.html.jinja").render(**_first_screen(report))


def _first_screen(report: Report) -> dict[str, Any]:
    return {
        "report": report,
        "headline": headline(report).partition(", ")[2],
        "verdict": verdict(report),
        "rows": comparison(report),
        "answers": [entry for entry in answers(report) if entry.label != "memory holds"],
        "gauge": gauge(report),
        "colours": COLOURS,
        "colour": colour,
    }


def _tables(report: Report) -> dict[str, Table]:
    made = {
        "every": every_rank(report),
        "phases": phases(report),
        "options": options(report),
        "sizes": sizes(report),
        "levers": levers(report),
        "waiting": waiting(report),
        "blocks": blocks(report),
        "events": events(report),
    }
    return {name: table for name, table in made.items() if table.rows}


# ---- drawn without plotly


@dataclass(frozen=True)
class BarSegment:
    """A segment of a bar."""

    name: str
    """The memory category."""
    meaning: str
    """Description of the category."""
    colour: str
    """Its colour."""
    size: str
    """Its size in words."""
    width: float
    """Percent of the bar."""


@dataclass(frozen=True)
class Gauge:
    """The peak memory against the budget, as one bar."""

    parts: tuple[BarSegment, ...]
    """Its segments, from the left."""
    budget: float
    """Where the budget ends, percent of the bar."""
    measured: float | None
    """Where the measured peak lies, percent of the bar; None if it was not measured."""
    measured_size: str
    """The measured peak in words."""
    label: str
    """What it shows, in a sentence."""


def gauge(report: Report) -> Gauge | None:
    """Return the bar for the step's peak; None where the plan predicts nothing."""
    plan, limit, seen = report.plan, report.allowance.limit, report.pace.peak
    holds = peak_holds(report)
    if not holds:
        return None
    whole = max(limit, seen or 0, sum(size for _, size in holds))
    parts = tuple(
        BarSegment(kind, MEANING.get(kind, ""), colour(kind), format_bytes(size), round(100 * size / whole, 3))
        for kind, size in holds
        if size > 0.001 * whole  # narrower than a pixel
    )
    where = "" if report.curve is None else f", {at_moment(report.curve.peak)}"
    label = f"{format_bytes(plan.predicted.peak + plan.held)} of {format_bytes(limit)}{where}"
    measured = None if seen is None else round(100 * seen / whole, 3)
    return Gauge(parts, round(100 * limit / whole, 3), measured, format_bytes(seen or 0), label)


@dataclass(frozen=True)
class BlockBar:
    """One block's memory as two bars."""

    name: str
    """The block; "" is everything outside the blocks."""
    kept: str
    """Its bytes saved for backward, in words."""
    kept_width: float
    """Percent of the widest bar."""
    transient: str
    """Its temporary bytes, in words."""
    transient_width: float
    """Percent of the widest bar."""
    again: str
    """Seconds per step to recompute its forward, in words."""
    checkpointed: str
    """Who checkpoints it."""


def block_bars(report: Report) -> tuple[BlockBar, ...]:
    """Return the bars of the blocks and of everything outside them."""
    shown = report.blocks[:MOST]
    widest = max((max(block.kept, block.transient) for block in shown), default=0) or 1
    return tuple(
        BlockBar(
            block.name,
            format_bytes(block.kept),
            round(100 * block.kept / widest, 2),
            format_bytes(block.transient),
            round(100 * block.transient / widest, 2),
            "-" if block.recompute is None else format_seconds(block.recompute),
            f"by {block.checkpointed}" if block.checkpointed else "-",
        )
        for block in shown
    )
