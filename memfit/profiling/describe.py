"""Formats explanations and module trees as text: cells that every view lays out itself, and plain lines of them.

Not covered: what a format needs beyond that (escaping happens where the format is known).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit._units import format_bytes, format_count, format_flops, format_seconds

if TYPE_CHECKING:
    from memfit.profiling.explain import Explanation
    from memfit.profiling.tree import ModuleCost, ModuleTree

NAMES = {
    "input": "the input",
    "hand over": "the hand-over of gradients",
    "clip": "the clipping of gradients",
    "optimizer": "the optimizer's step",
}
"""Phases of the step, in display form."""
LOOSE = "(outside its modules)"
"""Stands for the model itself: its own forward, the loss, the optimizer."""
DEPTH = 3
"""Levels of modules shown below the model."""
SHARES = 9
"""Rows of modules in an explanation."""
MOSTLY = 0.2
"""A category is named if it holds at least this share of what its modules hold."""
LABEL = 14
"""Width of the labels on the left, in columns."""


_TIMES = {"modelled": "time, modelled", "measured": "forward time"}
"""Headings of the seconds, by their source."""


@dataclass(frozen=True)
class TreeRow:
    """A row of the tree."""

    level: int
    """Levels below the model."""
    name: str
    """The module, or "each of 12"."""
    kind: str
    """Its class; "" if unknown or not shown."""
    cells: tuple[str, ...]
    """One for each column after the first."""
    cost: ModuleCost
    """The entry that the cells describe."""
    closes: bool = False
    """Whether deeper rows of this module are omitted."""


# ---- the explanation


def explanation_facts(found: Explanation) -> tuple[tuple[str, str], ...]:
    """Returns (label, text) pairs: how much, when, what."""
    return tuple(_facts(found))


def _facts(found: Explanation) -> Iterator[tuple[str, str]]:
    yield "peak", _size(found)
    if found.peak.driver is not None:
        most = f" (at most {format_bytes(found.peak.upper)})" if found.peak.upper > found.peak.expected else ""
        reserved = f"{format_bytes(found.peak.reserved or 0)} reserved{most}"
        words = f"{reserved}, {format_bytes(found.peak.driver)} as the driver counts"
        yield "allocator", words + ("" if found.smallest_budget is None else _enough(found.smallest_budget))
    if found.moment is not None:
        yield "reached", str(found.moment)
    if found.holds:
        yield "it holds", ", ".join(f"{kind} {format_bytes(size)}" for kind, size in found.holds)
    if found.tensors and found.beside > 0:
        yield "beside it", f"{format_bytes(found.beside)} that no tensor holds: rounded sizes, library workspaces"
    if found.evaluation is not None:
        more = "more than the training step" if found.evaluation.exceeds else "not more than the training step"
        size = format_bytes(found.evaluation.peak.expected)
        yield "evaluation", f"{size} with batches of {found.evaluation.samples}: {more}"
    if found.unknown:
        yield "not known", found.unknown


def _size(found: Explanation) -> str:
    peak = found.peak
    on_card = peak.driver is not None
    words = f"{format_bytes(peak.allocated)} allocated" if on_card else f"{format_bytes(peak.expected)} expected"
    if found.tensors and format_bytes(found.tensors) not in words:
        words += f", {format_bytes(found.tensors)} of it tensors"
    return words + (f", at most {format_bytes(peak.upper)}" if not on_card and peak.upper > peak.expected else "")


def _enough(least: int) -> str:
    return f"; it completes with {format_bytes(least)} reserved"


def share_cells(found: Explanation, most: int = SHARES) -> tuple[tuple[str, ...], ...]:
    """Returns (share of the tensors, bytes, modules, categories) of each entry; beyond `most` rows, the smallest are merged."""
    whole = max(1, found.tensors)
    rows = []
    shown = len(found.modules) if len(found.modules) <= most else most - 1
    for share in found.modules[:shown]:
        alike = f" ({share.alike} alike)" if share.alike > 1 else ""
        what = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in share.holds if size >= MOSTLY * share.size)
        rows.append((percent(share.size / whole), format_bytes(share.size), f"{share.module or LOOSE}{alike}", what))
    if found.modules[shown:]:
        size = sum(share.size for share in found.modules[shown:])
        rows.append((percent(size / whole), format_bytes(size), f"{len(found.modules) - shown} others", ""))
    return tuple(rows)


def tensor_cells(found: Explanation) -> tuple[tuple[str, ...], ...]:
    """Returns (count and size, category, module, origin) of the largest tensors."""
    rows = []
    for one in found.largest:
        size = f"{one.count} x {format_bytes(one.size)}" if one.count > 1 else format_bytes(one.size)
        born = "there before the step" if one.phase == "present" else f"born in {NAMES.get(one.phase, one.phase)}"
        made = f"by {one.operation}, {born}" if one.operation else born
        rows.append((size, one.category, one.module or LOOSE, made))
    return tuple(rows)


def explanation_lines(found: Explanation) -> Iterator[str]:
    """Formats an explanation for a terminal."""
    yield f"a step with micro-batches of {found.samples}"
    for label, text in explanation_facts(found):
        yield f"  {label:<{LABEL}}{text}"
    for label, rows, right in (("by module", share_cells(found), (0, 1)), ("largest", tensor_cells(found), (0,))):
        for index, line in enumerate(aligned(rows, right)):
            yield f"  {label if not index else '':<{LABEL}}{line}".rstrip()


# ---- the tree


def tree_columns(tree: ModuleTree) -> tuple[str, ...]:
    """Returns the headings; the first is the heading of the module."""
    found = ["module", "parameters", "in bytes", "kept", "transient", "FLOPs"]
    if tree.seconds_are:
        found.append(_TIMES.get(tree.seconds_are, "forward time, est."))
    return (*found, "at the peak", "share")


def tree_rows(tree: ModuleTree, depth: int | None = DEPTH) -> tuple[TreeRow, ...]:
    """Returns the rows of the tree, down to `depth` levels; None: all."""
    return tuple(_rows(tree, tree.root, 0, 1, depth))


def _rows(tree: ModuleTree, cost: ModuleCost, level: int, per: int, left: int | None) -> Iterator[TreeRow]:
    """`per` is the number of identical parents that this entry belongs to; figures are those within one parent."""
    several = cost.alike // per
    shown = bool(cost.children) and left != 0
    kind = f"{cost.kind}, {several} alike" if several > 1 else cost.kind
    yield TreeRow(level, cost.name, kind, tree_cells(tree, cost, per), cost, bool(cost.children) and not shown)
    if several > 1:
        level += 1
        yield TreeRow(level, f"each of {several}", "", tree_cells(tree, cost, cost.alike), cost)
    for child in cost.children if shown else ():
        yield from _rows(tree, child, level + 1, cost.alike, None if left is None else left - 1)


def tree_cells(tree: ModuleTree, cost: ModuleCost, per: int) -> tuple[str, ...]:
    """Returns the figures of an entry, as those of one of `per` identical modules."""
    whole = max(1, tree.root.at_peak)
    known = not tree.unknown
    seconds = cost.seconds if tree.seconds_are == "modelled" else cost.forward_seconds
    cells = [
        _cell(cost, "parameters", per, format_count),
        _one(cost.held("parameters"), per, format_bytes) if known else "-",
        _cell(cost, "kept", per, format_bytes) if known else "-",
        format_bytes(cost.transient) if cost.transient else "-",
        _cell(cost, "flops", per, format_flops),
    ]
    if tree.seconds_are:
        cells.append(_one(seconds, per, format_seconds))
    return (*cells, _cell(cost, "at_peak", per, format_bytes), percent(cost.at_peak / per / whole) if cost.at_peak else "-")


def _cell(cost: ModuleCost, name: str, per: int, words: Callable[[float], str]) -> str:
    """A figure, with a tilde if it differs between the modules of an entry."""
    value = getattr(cost, name)
    return ("~" if value and per > 1 and name in cost.differ else "") + _one(value, per, words)


def _one(value: float | None, per: int, words: Callable[[float], str]) -> str:
    return words(value / per) if value else "-"


def tree_notes(tree: ModuleTree, depth: int | None = DEPTH) -> Iterator[str]:
    """Explains the figures."""
    root = tree.root
    if tree.unknown:
        yield tree.unknown
        return
    yield "kept: what a micro-batch's forward saves for backward; transient: the most temporary memory at once"
    if root.flops is not None:
        yield "FLOPs: of matrix products, convolutions and attention, in forward and backward of a micro-batch"
    yield "entries inside a module add up to it, except transient: not all peak at the same moment"
    if root.seconds is not None and root.forward_seconds is not None:
        both = f"{format_seconds(root.seconds)}, {format_seconds(root.forward_seconds)} of it forward"
        yield f"a micro-batch of {tree.samples} takes {both}, {tree.seconds_are}"
    rows = tree_rows(tree, depth)
    if any("~" in cell for row in rows for cell in row.cells):
        yield "~ where those alike differ: their mean"
    if any(row.closes for row in rows):
        yield "some modules have more inside: --depth shows more levels"


def tree_lines(tree: ModuleTree, depth: int | None = DEPTH) -> Iterator[str]:
    """Formats a tree for a terminal."""
    rows = [tree_columns(tree)]
    for row in tree_rows(tree, depth):
        kind = f"  {row.kind}" if row.kind and row.kind != row.name else ""
        rows.append((f"{'  ' * row.level}{row.name}{kind}", *row.cells))
    yield from aligned(rows, range(1, len(rows[0])))
    yield from tree_notes(tree, depth)


# ---- common


def percent(share: float) -> str:
    """Formats a share of one as a percentage."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> Iterator[str]:
    """Aligns cells in columns; the columns in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = (cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        yield "  ".join(cells).rstrip()
