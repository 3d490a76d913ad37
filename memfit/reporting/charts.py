"""Builds the charts of a report as plotly.js figures: plain dictionaries, without importing plotly.

Colours of text and lines are names ("ink", "muted", "line", "paper", "accent") that the page replaces with its light or dark
theme's. Every name in a figure is escaped, because plotly.js interprets some HTML in text. Not covered: the page's layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any

from memfit._units import format_bytes, format_seconds, in_unit, unit_for
from memfit.planning.plan import Option
from memfit.planning.wording import way
from memfit.reporting.colours import COLOURS, colour
from memfit.reporting.facts import Curve
from memfit.reporting.lines import at_moment
from memfit.reporting.pace import seconds_of, steady
from memfit.reporting.tables import MOST
from memfit.reporting.words import printable

if TYPE_CHECKING:
    from memfit.reporting.report import Report

Figure = dict[str, Any]
SHORT = 18
"""Longest text in characters that fits beside a mark on small screens."""
Level = tuple[str, int, str, str]
"""A horizontal line in a chart: (words, bytes, dash, colour)."""


@dataclass(frozen=True)
class Chart:
    """A figure with its text alternative."""

    name: str
    """Its id on the page."""
    title: str
    """What it shows, in a few words."""
    label: str
    """What it shows, in a sentence, for readers who cannot see it."""
    figure: Figure
    """plotly.js data and layout."""
    height: int
    """Height in pixels."""


def charts(report: Report) -> dict[str, Chart]:
    """Return the report's charts that have data, by name."""
    made = (_memory(report), _speed(report), _sizes(report), _pace(report))
    return {chart.name: chart for chart in made if chart is not None}


# ---- memory over one step


def _memory(report: Report) -> Chart | None:
    curve = report.curve
    if curve is None:
        return None
    plan = report.plan
    lines = list(_levels(report))
    peak = curve.peak
    label = (
        f"Memory over one optimizer step by category. The peak, {format_bytes(peak.total + plan.held)}, is reached "
        f"{at_moment(peak)}. The budget is {format_bytes(report.allowance.limit)}."
    )
    return Chart("memory", "Memory over one step", printable(label), memory_figure(curve, plan.held, lines), 380)


def memory_figure(curve: Curve, held: int, lines: Sequence[Level]) -> Figure:
    """Return the stacked memory layers of a step on top of the `held` bytes, with `lines` as horizontal levels."""
    tallest = max([curve.peak.total + held, *(at for _, at, _, _ in lines)])
    unit, name = unit_for([tallest])
    layers = [("held", (held,) * len(curve.events))] if held else []
    data = [_area(kind, sizes, curve.events, unit) for kind, sizes in (*layers, *curve.layers)]
    layout = _layout(name, "tensors born and freed, in order")
    layout["xaxis"] |= {"showticklabels": False, "showgrid": False}
    layout["yaxis"] |= {"range": [0, 1.1 * tallest / unit]}
    layout["hovermode"] = "x unified"
    layout["shapes"], layout["annotations"] = _marks(curve, lines, unit, name)
    return {"data": data, "layout": layout}


def point_at(figure: Figure, at: int, words: str) -> None:
    """Mark the event `at` on the upper edge of a figure's layers, with `words` as its label."""
    events = figure["data"][0]["x"]
    y = sum(trace["y"][events.index(at)] for trace in figure["data"])
    figure["layout"]["xaxis"]["range"] = [events[0], events[-1]]  # else plotly widens the axis for the words
    left = at - events[0] > (events[-1] - events[0]) / 2
    line = {"color": "accent", "width": 1, "dash": "dot"}
    figure["layout"]["shapes"].append({"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at, "line": line})
    figure["layout"]["annotations"].append(
        {
            "x": at,
            "y": y,
            "text": escape(printable(words)),
            "name": "narrow" if len(words) > SHORT else "wide",
            "font": {"color": "accent", "size": 11},
            "bgcolor": "paper",
            "showarrow": True,
            "arrowcolor": "accent",
            "arrowhead": 2,
            "ax": -24 if left else 24,
            "ay": 26,
            "xanchor": "right" if left else "left",
        }
    )


def _area(kind: str, sizes: Sequence[int], events: Sequence[int], unit: int) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": kind,
        "x": list(events),
        "y": [float(f"{size / unit:.5g}") for size in sizes],
        "stackgroup": "all",
        "fillcolor": colour(kind),
        "line": {"color": colour(kind), "width": 0, "shape": "hv"},
        "hovertemplate": "%{y:.1f}",
    }


def _levels(report: Report) -> Iterator[Level]:
    """The horizontal lines of the memory chart."""
    plan, peak = report.plan, report.pace.peak
    yield "predicted peak", plan.predicted.peak + plan.held, "dot", "ink"
    if peak is not None:
        yield "measured peak", peak, "solid", "ink"
    limit = report.allowance.limit
    if limit <= 4 * (plan.predicted.upper + plan.held):  # else the curve would be squashed at the bottom
        yield "budget", limit, "dash", "accent"


def _marks(curve: Curve, lines: Sequence[Level], unit: int, name: str) -> tuple[list[Figure], list[Figure]]:
    shapes, notes = [], []
    for words, at, dash, tone in lines:
        y = at / unit
        line = {"color": tone, "width": 1.5, "dash": dash}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line})
        # Predicted and measured peak lie close together, so their names stand at opposite ends.
        notes.append(_named_line(f"{words} {in_unit(at, unit)} {name}", y, tone, right=words == "measured peak"))
    phases, names = _phase_marks(curve)
    return shapes + phases, notes + names


def _phase_marks(curve: Curve) -> tuple[list[Figure], list[Figure]]:
    """A faint line at the start of each phase, and the names of phases wide enough for them."""
    shapes, notes = [], []
    starts = [*(moment.start for moment in curve.moments), curve.events[-1] + 1]
    width = max(1, starts[-1] - starts[0])
    for moment, begin, end in zip(curve.moments, starts, starts[1:]):
        line = {"color": "line", "width": 1}
        across = {"yref": "paper", "y0": 0, "y1": 1, "x0": begin, "x1": begin}
        shapes.append({"type": "line", **across, "line": line, "layer": "below"})
        if end - begin > 0.05 * width:
            number = f" {moment.micro_batch}" if moment.micro_batch and curve.micro_batches > 1 else ""
            font = {"size": 10, "color": "muted"}
            name = "narrow" if end - begin < 0.18 * width else "wide"  # narrow ones are left out on small screens
            where = {"x": (begin + end) / 2, "yref": "paper", "y": 1.0, "yanchor": "bottom", "name": name}
            notes.append({**where, "text": escape(moment.phase + number), "showarrow": False, "font": font})
    return shapes, notes


# ---- the choice of micro-batch


def _speed(report: Report) -> Chart | None:
    timed = [o for o in report.plan.options[:MOST] if o.fits and o.cost.seconds is not None]
    if len(timed) < 2:
        return None
    data = _points(timed, [seconds_of(o, report) or 0.0 for o in timed], "s per step")
    layout = _layout("seconds", "samples per micro-batch, logarithmic")
    layout["xaxis"] |= _doubling([o.micro_batch for o in timed])
    fastest = min(timed, key=lambda o: seconds_of(o, report) or 0.0)
    label = f"Seconds per step against the size of the micro-batch, of what fits; fastest is {way(fastest)}."
    return Chart("speed", "Seconds per step", label, {"data": data, "layout": layout}, 300)


def _sizes(report: Report) -> Chart | None:
    options, held = report.plan.options[:MOST], report.plan.held
    if len(options) < 2:
        return None
    limit = report.allowance.limit - report.allowance.margin
    uppers = [o.cost.upper + held for o in options]
    data = _points(options, [float(upper) for upper in uppers], "B at most")
    layout = _layout("logarithmic", "samples per micro-batch, logarithmic")
    layout["xaxis"] |= _doubling([o.micro_batch for o in options])
    layout["yaxis"] |= _doubling(uppers, format_bytes) | {"range": _powers([*uppers, limit])}
    line = {"color": "accent", "width": 1.5, "dash": "dash"}
    layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit, "line": line}]
    # On a logarithmic axis, plotly.js expects the positions of annotations as exponents.
    words = f"budget less margin {format_bytes(limit)}"
    layout["annotations"] = [_named_line(words, math.log10(max(1, limit)), "accent")]
    fitting = f"{sum(o.fits for o in options)} of {len(options)} plans stay below {format_bytes(limit)}"
    label = f"Memory against the size of the micro-batch; {fitting}."
    return Chart("sizes", "Memory, at most", label, {"data": data, "layout": layout}, 300)


def _doubling(values: Sequence[int], words: Callable[[int], str] = str) -> Figure:
    """A logarithmic axis with at most 10 ticks, at powers of two."""
    ticks = [2**k for k in range(60) if min(values) / 2 < 2**k <= max(values) * 2]
    ticks = ticks[:: -(-len(ticks) // 10)]
    return {"type": "log", "tickvals": ticks, "ticktext": [words(tick) for tick in ticks]}


def _powers(values: Sequence[int]) -> list[float]:
    """The range of a logarithmic axis, in exponents of ten."""
    return [math.log10(max(1, min(values)) / 1.3), math.log10(max(1, *values) * 1.3)]


def _points(options: Sequence[Option], values: Sequence[float], what: str) -> list[Figure]:
    """One trace each for options that fit, fit with levers (checkpointing, precision), do not fit, and for the plan."""
    pairs = list(zip(options, values))
    kinds = {
        "fits": [p for p in pairs if p[0].fits and not _levers(p[0]) and p[0].reason],
        "fits with levers": [p for p in pairs if p[0].fits and _levers(p[0]) and p[0].reason],
        "does not fit": [p for p in pairs if not p[0].fits],
        "the plan": [p for p in pairs if not p[0].reason],
    }
    return [_scatter(kind, found, what) for kind, found in kinds.items() if found]


_MARKERS = {
    "fits": {"symbol": "circle", "size": 8, "color": COLOURS["parameters"]},
    "fits with levers": {"symbol": "diamond", "size": 9, "color": COLOURS["optimizer"]},
    "does not fit": {"symbol": "x-thin", "size": 8, "color": "muted", "line": {"width": 2, "color": "muted"}},
    "the plan": {"symbol": "circle", "size": 13, "color": "accent", "line": {"width": 2, "color": "paper"}},
}


def _scatter(kind: str, pairs: Sequence[tuple[Option, float]], what: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [option.micro_batch for option, _ in pairs],
        "y": [float(f"{value:.5g}") for _, value in pairs],
        "customdata": [escape(printable(way(option))) for option, _ in pairs],
        "marker": _MARKERS[kind],
        "hovertemplate": f"%{{customdata}}<br>%{{y:.4~s}}{what}<extra></extra>",
    }


def _levers(option: Option) -> bool:
    return bool(option.checkpoint) or option.precision != "off"


# ---- seconds of each step


def _pace(report: Report) -> Chart | None:
    seconds, waits = report.pace.seconds, report.pace.waits
    if len(seconds) < 2:
        return None
    first = report.pace.steps - len(seconds) + 1
    data = [_steps("computing", seconds, first, COLOURS["parameters"])]
    if len(waits) == len(seconds):
        data.append(_steps("waiting for the loader", waits, first, COLOURS["gradients"]))
    layout = _layout("seconds", "optimizer step")
    layout |= {"barmode": "stack", "bargap": 0.15, "hovermode": "x unified"}
    label = f"Seconds of each optimizer step; the median is {format_seconds(median(steady(report)))}."
    return Chart("pace", "Seconds of each step", label, {"data": data, "layout": layout}, 260)


def _steps(name: str, values: Sequence[float], first: int, tone: str) -> Figure:
    return {
        "type": "bar",
        "name": name,
        "x": list(range(first, first + len(values))),
        "y": [float(f"{value:.4g}") for value in values],
        "marker": {"color": tone},
        "hovertemplate": "%{y:.3s}s",
    }


# ---- common


def _named_line(text: str, at: float, tone: str, *, right: bool = False) -> Figure:
    corner = {"x": 1 if right else 0, "xanchor": "right" if right else "left"}
    font = {"color": tone, "size": 11}
    return {
        "xref": "paper",
        **corner,
        "y": at,
        "yanchor": "bottom",
        "text": text,
        "showarrow": False,
        "font": font,
        "bgcolor": "paper",
    }


def _layout(up: str, along: str) -> Figure:
    """A figure's layout; `up` and `along` are the titles of its axes."""
    axis = {"gridcolor": "line", "zerolinecolor": "line", "linecolor": "line", "automargin": True, "fixedrange": True}
    return {
        "font": {"size": 12, "color": "ink"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 28, "b": 8},
        "showlegend": False,
        "hoverlabel": {"font": {"size": 12}},
        "xaxis": {**axis, "fixedrange": False, "title": {"text": along}},
        "yaxis": {**axis, "rangemode": "tozero", "title": {"text": up}},
    }
