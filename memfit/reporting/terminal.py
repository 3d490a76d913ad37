"""Prints the report on a terminal: the first screen, and some of the plans that were not taken.

ASCII except for the reader's own names. Not covered: charts and the other tables; `Report.save` writes them.
"""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

from memfit._units import format_seconds, in_unit, unit_for
from memfit.planning.wording import FACTORS, SHOWN, nearest, of_median, reason, way
from memfit.reporting.colours import colour
from memfit.reporting.lines import Answer, answers, comparison, headline, verdict
from memfit.reporting.pace import seconds_of
from memfit.reporting.tables import every_rank, notes, without
from memfit.reporting.words import printable

if TYPE_CHECKING:
    from memfit.reporting.report import Report

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from memfit.planning.plan import Option

WIDTH = 120
"""Width in characters without a terminal."""
NARROW = 40
"""Minimum width in characters."""
WORDY = 36
"""Maximum width of the column "with memfit"."""
ROOMY = 90
"""Minimum width for the numbers of the plans that were not taken, and for all columns of the ranks."""
LABEL = 14
"""Width of the labels on the left, the same in all parts."""
_TONES = {"good": "green", "bad": "bold red", "open": "yellow"}


def show(report: Report) -> None:
    """Print the report on stdout."""
    from rich.console import Console

    _print(report, Console(soft_wrap=False))


def plain(report: Report, width: int | None = None) -> str:
    """Return the report as text without colours, `width` characters wide (None: as wide as the terminal)."""
    from rich.console import Console

    wide = width or max(NARROW, shutil.get_terminal_size((WIDTH, 24)).columns)
    to = io.StringIO()
    _print(report, Console(file=to, width=wide, color_system=None, force_terminal=False, force_jupyter=False))
    return "\n".join(line.rstrip() for line in to.getvalue().splitlines())


def _print(report: Report, console: Console) -> None:
    from rich.text import Text

    console.print(Text.assemble(("memfit", "bold"), "  ", printable(headline(report))))
    console.print()
    console.print(_answers((verdict(report),)))
    console.print()
    console.print(_comparison(report))
    console.print()
    console.print(_answers(answers(report)))
    if report.every:
        console.print()
        console.print(_every(report, console.width))
    if report.plan.rejected:
        console.print()
        console.print(_not_taken(report, console.width))
    said = tuple(notes(report))
    if said:
        console.print()
        console.print(_answers((Answer("note", said),)))


def _comparison(report: Report) -> RenderableType:
    from rich.text import Text

    table = _grid()
    table.add_column(style="dim", no_wrap=True, min_width=LABEL)
    table.add_column(header="as the script asked", max_width=26, overflow="fold")
    table.add_column(header="with memfit", max_width=WORDY, overflow="fold")
    table.add_column(style="dim", overflow="fold")
    table.show_header = True
    for row in comparison(report):
        table.add_row(row.name, *(Text(printable(cell)) for cell in (row.asked, row.here, row.remark)))
    return table


def _answers(entries: tuple[Answer, ...]) -> RenderableType:
    from rich.text import Text

    table = _grid()
    table.add_column(no_wrap=True, min_width=LABEL)
    table.add_column(overflow="fold")
    for entry in entries:
        label = Text(entry.label, style=_TONES.get(entry.tone, "dim"))
        text = Text("\n".join(map(printable, entry.lines)))
        if entry.label == "memory holds":
            _in_colour(text)
        table.add_row(label, text)
    return table


def _in_colour(text: object) -> None:
    """Colour the names of categories, as every view does."""
    from rich.text import Text

    assert isinstance(text, Text)
    for word in text.plain.partition("(")[0].split():
        if word.isalpha():
            text.highlight_words([word], style=colour(word))


def _every(report: Report, width: int) -> RenderableType:
    """All ranks side by side, with fewer columns on a narrow terminal."""
    from rich.text import Text

    found, table = every_rank(report), _grid()
    for column in ("device", "held beside", "at most", "computing") if width < ROOMY else ():
        found = without(found, column) if column in found.columns else found
    table.add_column(style="dim", no_wrap=True, min_width=LABEL)
    for index, column in enumerate(found.columns[1:], start=1):
        table.add_column(header=column, justify="right" if index in found.numbers else "left", overflow="fold")
    table.show_header = True
    for row in found.rows:
        table.add_row(f"rank {row[0]}", *(Text(printable(cell)) for cell in row[1:]))
    return table


def _not_taken(report: Report, width: int) -> RenderableType:
    """Some of the plans that were not taken, those closest in micro-batch size. The plan itself comes first, as it was
    considered beside them, so that numbers of the same kind are compared. A narrow terminal shows no numbers."""
    from rich.text import Text

    plan, table, wide = report.plan, _grid(), width >= ROOMY
    table.add_column(style="dim", no_wrap=True, min_width=LABEL)
    table.add_column(header=FACTORS.replace(" x ", " x\n"), overflow="fold")
    for header in ("expected", "at most", "per step") if wide else ():
        table.add_column(header=header, justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    table.show_header = True
    others = nearest(plan.rejected, plan.micro_batch, SHOWN)
    taken = tuple(option for option in plan.options if not option.reason)
    unit = unit_for([option.cost.upper + plan.held for option in (*taken, *others)])
    for index, option in enumerate((*taken, *others)):
        why = reason(option, plan) or "this is the plan"
        cells = (way(option), *(_numbers(option, report, unit) if wide else ()), Text(printable(why)))
        label = "taken" if index < len(taken) else "not taken" if index == len(taken) else ""
        table.add_row(label, *cells)
    more = [f"and {len(plan.rejected) - len(others):,} more"] if len(plan.rejected) > len(others) else []
    if more or plan.by_size:
        table.add_row("", *more, *([""] * (len(table.columns) - 2 - len(more))), of_median(plan))
    return table


def _numbers(option: Option, report: Report, unit: tuple[int, str]) -> tuple[str, str, str]:
    """An option's expected bytes, its upper bound and its seconds."""
    seconds = seconds_of(option, report)
    expected, most = (
        f"{in_unit(size + report.plan.held, unit[0])} {unit[1]}" for size in (option.cost.peak, option.cost.upper)
    )
    return expected, most, "-" if seconds is None else format_seconds(seconds)


def _grid() -> Table:
    """A table without lines."""
    from rich.table import Table

    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
