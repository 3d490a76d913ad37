"""Renders the report as Markdown, to paste into an issue or a pull request.

Not covered: charts. Names are escaped so that they cannot become markup or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit.reporting.lines import answers, comparison, headline, verdict
from memfit.reporting.tables import Table, notes, tables
from memfit.reporting.words import made_with, printable

if TYPE_CHECKING:
    from memfit.reporting.report import Report

_MARKUP = re.compile(r"([\\`*_{}\[\]()#|~])")


def markdown(report: Report) -> str:
    """Render the whole report as Markdown."""
    answer = verdict(report)
    lines = [f"# memfit: {escaped(headline(report))}", ""]
    lines += [f"**{answer.label}**: {escaped('; '.join(answer.lines))}", "", *table_lines(_compared(report)), ""]
    for entry in answers(report):
        lines += [f"- **{entry.label}**: {'<br>'.join(escaped(line) for line in entry.lines)}"]
    for table in tables(report):
        lines += ["", f"## {table.title}", "", *table_lines(table), *(["", escaped(table.note)] if table.note else [])]
    said = [f"- {escaped(note)}" for note in notes(report)]
    lines += ["", "## Notes", "", *said] if said else []
    return "\n".join([*lines, "", f"*{escaped(made_with(report.made, report.software))}*", ""])


def escaped(text: str) -> str:
    """Escape everything in the text that Markdown or HTML reads as markup."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", safe)


def _compared(report: Report) -> Table:
    rows = tuple((row.name, row.asked, row.here, row.remark) for row in comparison(report))
    return Table("", ("", "as the script asked", "with memfit", ""), rows)


def table_lines(table: Table) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield _row(tuple(map(escaped, table.columns)))
    yield _row(tuple("---:" if i in table.numbers else "---" for i in range(len(table.columns))))
    for index, row in enumerate(table.rows):
        cells = tuple(map(escaped, row))
        yield _row(tuple(f"**{cell}**" for cell in cells) if index in table.marked else cells)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
