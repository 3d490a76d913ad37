"""Builds the tables of a profile, as cells of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.profiling.describe import share_cells, tensor_cells, tree_columns, tree_rows
from memfit.profiling.explain import MODULES
from memfit.reporting.tables import Table

if TYPE_CHECKING:
    from memfit.reporting.profiled import ProfileReport


def module_table(report: ProfileReport) -> Table:
    """Build the table of the peak's bytes by module."""
    rows = tuple((module, size, share, what) for share, size, module, what in share_cells(report.explanation, MODULES))
    return Table("By module", ("module", "bytes", "share", "mostly"), rows, frozenset({1, 2}))


def tensor_table(report: ProfileReport) -> Table:
    """Build the table of the largest tensors at the peak."""
    rows = tuple((module, size, kind, made) for size, kind, module, made in tensor_cells(report.explanation))
    return Table("The largest tensors", ("born in", "bytes", "what for", "made"), rows, frozenset({1}))


def tree_table(report: ProfileReport) -> Table:
    """Build the table of the module tree; dots before a module's name show its level."""
    rows = []
    for row in tree_rows(report.tree, report.depth):
        kind = f" ({row.kind})" if row.kind and row.kind != row.name else ""
        rows.append((f"{'. ' * row.level}{row.name}{kind}", *row.cells))
    columns = tree_columns(report.tree)
    return Table("The modules", columns, tuple(rows), frozenset(range(1, len(columns))))
