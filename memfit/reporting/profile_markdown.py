"""Renders a profile as Markdown. Not covered: charts. Names are escaped so that they cannot become markup or HTML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit.profiling.describe import explanation_facts, tree_notes
from memfit.reporting.markdown import escaped, table_lines
from memfit.reporting.profile_tables import module_table, tensor_table, tree_table
from memfit.reporting.words import made_with

if TYPE_CHECKING:
    from memfit.reporting.profiled import ProfileReport


def markdown(report: ProfileReport) -> str:
    """Render the whole profile as Markdown."""
    return "\n".join([*_lines(report), ""])


def _lines(report: ProfileReport) -> Iterator[str]:
    model = report.profile.model
    yield f"# memfit: {escaped(f'{model.name} with {model.optimizer} on {report.where}, micro-batches of {report.samples}')}"
    yield ""
    for label, text in explanation_facts(report.explanation):
        yield f"- **{label}**: {escaped(text)}"
    for table in (module_table(report), tensor_table(report), tree_table(report)):
        if table.rows:
            yield from ("", f"## {table.title}", "", *table_lines(table))
    for note in (*tree_notes(report.tree, report.depth), *report.profile.notes):
        yield from ("", escaped(note))
    yield from ("", f"*{escaped(made_with(report.made, report.software))}*")
