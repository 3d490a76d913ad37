"""Prints a profile on a terminal: what the step takes, the peak, what it holds, and the tree of modules.

ASCII except for the reader's own names. Not covered: the timeline itself; `ProfileReport.save` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.profiling.describe import (
    explanation_facts,
    explanation_lines,
    share_cells,
    tensor_cells,
    tree_columns,
    tree_lines,
    tree_notes,
    tree_rows,
)
from memfit.reporting.colours import colour
from memfit.reporting.words import printable

if TYPE_CHECKING:
    from memfit.reporting.profiled import ProfileReport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LABEL = 14
"""Width of the labels on the left, in characters."""
NARROW, ESSENTIAL = 100, ("module", "parameters", "kept", "at the peak", "share")
"""Width of a terminal below which the tree shows only these columns."""


def show(report: ProfileReport) -> None:
    """Print the profile on stdout."""
    from rich.console import Console

    _print(report, Console(soft_wrap=False))


def plain(report: ProfileReport) -> str:
    """Return the profile as plain lines of text."""
    lines = [*str(report.profile).splitlines(), "", *explanation_lines(report.explanation), ""]
    return "\n".join(map(printable, [*lines, *tree_lines(report.tree, report.depth)]))


def _print(report: ProfileReport, console: Console) -> None:
    from rich.text import Text

    first, *rest = str(report.profile).splitlines()
    console.print(Text(printable(first), style="bold"))
    for line in rest:
        console.print(Text(printable(line)))
    console.print()
    console.print(Text(f"a step with micro-batches of {report.samples}", style="bold"))
    console.print(_facts(report))
    for title, rows, right, named in (
        ("by module", share_cells(report.explanation), (0, 1), 3),
        ("the largest tensors", tensor_cells(report.explanation), (0,), 1),
    ):
        if rows:
            console.print()
            console.print(Text(title, style="bold"))
            console.print(_cells(rows, right, named))
    console.print()
    console.print(_tree(report, console.width))
    for note in tree_notes(report.tree, report.depth):
        console.print(Text(printable(note), style="dim"))


def _facts(report: ProfileReport) -> Table:
    from rich.text import Text

    table = _grid()
    table.add_column(no_wrap=True, min_width=LABEL, style="dim")
    table.add_column(overflow="fold")
    for label, text in explanation_facts(report.explanation):
        shown = Text(printable(text), style="yellow" if label == "not known" else "")
        if label == "it holds":
            _in_colour(shown)
        table.add_row(label, shown)
    return table


def _cells(rows: Sequence[Sequence[str]], right: Sequence[int], named: int) -> Table:
    """A table of text; the categories in column `named` have their colours."""
    from rich.text import Text

    table = _grid()
    for index in range(len(rows[0])):
        justify = "right" if index in right else "left"
        table.add_column(justify=justify, no_wrap=index in right or index == named == 1, overflow="fold")
    for row in rows:
        cells = [Text(printable(cell)) for cell in row]
        _in_colour(cells[named])
        table.add_row(*cells)
    return table


def _tree(report: ProfileReport, width: int) -> Table:
    from rich.text import Text

    table, columns = _grid(), tree_columns(report.tree)
    shown = [i for i, name in enumerate(columns) if width >= NARROW or name in ESSENTIAL]
    table.show_header = True
    for index in shown:
        table.add_column(columns[index], justify="right" if index else "left", no_wrap=bool(index), overflow="fold")
    for row in tree_rows(report.tree, report.depth):
        kind = f"  {printable(row.kind)}" if row.kind and row.kind != row.name else ""
        name = Text.assemble("  " * row.level, printable(row.name), (kind, "dim"))
        style = "bold" if not row.level else "dim" if not row.kind else ""
        cells = [name, *(Text(printable(cell)) for cell in row.cells)]
        table.add_row(*(cells[i] for i in shown), style=style)
    return table


def _in_colour(text: object) -> None:
    """Colour the names of categories, as every view does."""
    from rich.text import Text

    from memfit.profiling.timeline import CATEGORIES

    assert isinstance(text, Text)
    for kind in CATEGORIES:
        text.highlight_regex(rf"\b{kind}\b", style=colour(kind))


def _grid() -> Table:
    """A table without lines."""
    from rich.table import Table

    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
