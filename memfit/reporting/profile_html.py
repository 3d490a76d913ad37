"""Renders a profile as one HTML page that needs no network: memory over the step, the peak, the tree of modules to unfold.

Not covered: browsers without JavaScript, which show the tables but not the chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memfit._units import format_bytes, format_count
from memfit.profiling.describe import TreeRow, explanation_facts, tree_columns, tree_notes, tree_rows
from memfit.reporting.charts import Chart, memory_figure, point_at
from memfit.reporting.colours import MEANING, colour
from memfit.reporting.facts import Curve
from memfit.reporting.html import BarSegment
from memfit.reporting.pages import rendered
from memfit.reporting.profile_tables import module_table, tensor_table
from memfit.reporting.words import printable

if TYPE_CHECKING:
    from memfit.reporting.profiled import ProfileReport

OPEN, MOST = 1, 2000
"""Levels unfolded at first; maximum rows of the tree, above which it shows fewer levels."""


def page(report: ProfileReport) -> str:
    """Render the whole page, with the code of its chart inside."""
    profile = report.profile
    made = [chart for chart in (_memory(report),) if chart is not None]
    rows = _rows(report)
    return rendered(
        "profile.html.jinja",
        report=report,
        title=f"memfit: {profile.model.name}, micro-batches of {report.samples}",
        headline=_headline(report),
        moment=str(report.explanation.moment),
        facts=[fact for fact in explanation_facts(report.explanation) if fact[0] != "it holds"],
        parts=parts_of(report.explanation.holds, max(1, report.explanation.tensors)),
        charts={chart.name: chart for chart in made},
        figures={chart.name: chart.figure for chart in made},
        tables={"modules": module_table(report), "tensors": tensor_table(report)},
        columns=tree_columns(report.tree),
        branches=_nested(rows, report),
        notes=[*(note for note in tree_notes(report.tree, None)), *profile.notes],
        unfolded=OPEN,
        colour=colour,
    )


def _headline(report: ProfileReport) -> str:
    profile, model = report.profile, report.profile.model
    levers = f", {len(profile.checkpoint)} blocks checkpointed" if profile.checkpoint else ""
    return (
        f"{format_count(model.parameters)} parameters, {model.optimizer}, {profile.precision}{levers}, on {report.where}; "
        f"micro-batches of {report.samples}"
    )


# ---- memory over the step


def _memory(report: ProfileReport) -> Chart | None:
    curve, found = report.curve, report.explanation
    if curve is None or found.moment is None:
        return None
    lines = [("tensors at most", found.tensors, "dot", "ink")]
    if found.peak.reserved is not None:
        lines.append(("reserved", found.peak.reserved, "dash", "accent"))
    figure = memory_figure(curve, 0, lines)
    at = _fullest(curve)
    point_at(figure, at, _in_short(report))
    _spread(figure["layout"]["annotations"], len(lines), at - curve.events[0] > (curve.events[-1] - curve.events[0]) / 2)
    label = f"Memory over one step by category. The peak, {format_bytes(found.tensors)} of tensors, is reached {found.moment}."
    return Chart("memory", "Memory over one step", printable(label), figure, 400)


def _spread(annotations: Sequence[dict[str, object]], lines: int, left: bool) -> None:
    """Place the names of the levels at the end away from the peak."""
    for note in annotations[:lines]:
        note.update({"x": 0 if left else 1, "xanchor": "left" if left else "right"})


def _fullest(curve: Curve) -> int:
    totals = curve.totals
    return curve.events[totals.index(max(totals))]


def _in_short(report: ProfileReport) -> str:
    """The label of the mark at the peak: the operation, else the module, else the phase."""
    moment = report.explanation.moment
    assert moment is not None
    return moment.operation or moment.module or moment.phase


def parts_of(holds: Sequence[tuple[str, int]], whole: int) -> tuple[BarSegment, ...]:
    """Turn categories into the parts of a bar."""
    return tuple(
        BarSegment(kind, MEANING.get(kind, ""), colour(kind), format_bytes(size), round(100 * size / whole, 3))
        for kind, size in holds
        if size > 0.0005 * whole
    )


# ---- the tree


@dataclass
class Branch:
    """Holds a row of the module tree, and the rows inside it."""

    row: TreeRow
    """The row itself."""
    parts: tuple[BarSegment, ...]
    """Its bytes at the peak by category, as the parts of a bar."""
    inside: list[Branch] = field(default_factory=list)
    """The rows one level below."""


def _rows(report: ProfileReport) -> tuple[TreeRow, ...]:
    """All levels, or as many as stay within `MOST` rows."""
    rows = tree_rows(report.tree, None)
    depth = max((row.level for row in rows), default=0)
    while len(rows) > MOST and depth > 1:
        depth -= 1
        rows = tree_rows(report.tree, depth)
    return rows


def _nested(rows: Sequence[TreeRow], report: ProfileReport) -> list[Branch]:
    whole = max(1, report.tree.root.at_peak)
    top: list[Branch] = []
    path: list[Branch] = []
    for row in rows:
        per = row.cost.alike if not row.kind and row.name.startswith("each of ") else 1
        branch = Branch(row, parts_of([(kind, size // per) for kind, size in row.cost.holds], whole))
        del path[row.level :]
        (path[-1].inside if path else top).append(branch)
        path.append(branch)
    return top
