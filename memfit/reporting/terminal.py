"""The report on a terminal: the first screen, and some plans that were not taken.

ASCII but for the reader's own names. Not covered: charts and the other tables; `Report.save` has them.
"""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

from memfit._units import format_bytes, format_seconds
from memfit.reporting.colours import colour
from memfit.reporting.lines import Entry, answers, comparison, headline, verdict
from memfit.reporting.pace import seconds_of
from memfit.reporting.report import Report
from memfit.reporting.words import nearest, printable, reason, way

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

WIDTH = 120
"""Columns where there is no terminal to ask."""
NARROW = 40
"""Columns that are always used."""
ROOMY = 90
"""Columns from which the plans that were not taken are listed with their numbers."""
LABEL = 14
"""Columns of the labels on the left, the same in all parts."""
REJECTED = 6
"""Plans shown of those that were not taken."""
_TONES = {"good": "green", "bad": "bold red", "open": "yellow"}


def show(report: Report) -> None:
    """Print the report on stdout."""
    from rich.console import Console

    _print(report, Console(soft_wrap=False))


def plain(report: Report, width: int | None = None) -> str:
    """The same as text without colours, as wide as the terminal or as said."""
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
    if report.plan.rejected:
        console.print()
        console.print(_not_taken(report, console.width))


def _comparison(report: Report) -> RenderableType:
    from rich.text import Text

    table = _grid()
    table.add_column(style="dim", no_wrap=True, min_width=LABEL)
    table.add_column(header="as the script asked", max_width=26, overflow="fold")
    table.add_column(header="with memfit", max_width=26, overflow="fold")
    table.add_column(style="dim", overflow="fold")
    table.show_header = True
    for row in comparison(report):
        table.add_row(row.name, *(Text(printable(cell)) for cell in (row.asked, row.here, row.remark)))
    return table


def _answers(entries: tuple[Entry, ...]) -> RenderableType:
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
    """The names of categories in their colours, as everywhere."""
    from rich.text import Text

    assert isinstance(text, Text)
    for word in text.plain.partition("(")[0].split():
        if word.isalpha():
            text.highlight_words([word], style=colour(word))


def _not_taken(report: Report, width: int) -> RenderableType:
    """Some of the plans that were not taken, those nearest in size first of all; numbers only where there is room."""
    from rich.text import Text

    plan, table, wide = report.plan, _grid(), width >= ROOMY
    table.add_column(style="dim", no_wrap=True, min_width=LABEL)
    table.add_column(overflow="fold")
    for _ in range(2 * wide):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for index, option in enumerate(nearest(plan.rejected, plan.micro_batch, REJECTED)):
        seconds = seconds_of(option, report)
        numbers = (format_bytes(option.cost.upper + plan.held), "-" if seconds is None else format_seconds(seconds))
        cells = (way(option), *numbers[: 2 * wide], Text(printable(reason(option, plan))))
        table.add_row("" if index else "not taken", *cells)
    if len(plan.rejected) > REJECTED:
        table.add_row("", f"and {len(plan.rejected) - REJECTED} more")
    return table


def _grid() -> Table:
    """A table without lines."""
    from rich.table import Table

    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
