"""Compares a training on many devices that are not present, one row each.

Values come first, then their views: a table on a terminal, plain lines elsewhere, JSON. Not covered: the full plans. A row has
the essentials; `memfit plan --device` shows a whole plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memfit._units import count, format_at_least, format_bytes, format_count, format_seconds, three_digits
from memfit.reporting.files import restored, strict, write_in_format
from memfit.reporting.words import printable

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
"""Version of the JSON format."""
COLUMNS = (
    *("device", "memory", "fits, at most", "micro-batch x steps", "checkpointed", "precision", "per step", "samples/s"),
    "bound by",
)
"""Column headings."""
NUMBERS = (1, 6, 7)
"""Indices of right-aligned columns."""
LACKING = 12
"""Most rows shown for devices on which the training does not fit."""


@dataclass(frozen=True)
class DeviceRow:
    """The training on one device."""

    device: str
    """The device's name in the catalogue, for --device."""
    title: str
    """Its common name."""
    memory: int
    """Its total memory in bytes, as torch reports it."""
    limit: int
    """Bytes that the process may hold."""
    fits: bool
    """Whether there is a plan."""
    needs: int
    """The plan's upper bound of bytes that the process holds; without a plan, a budget in bytes that is enough."""
    micro_batch: int | None = None
    """Samples per forward; None where there is no plan, in which case the fields below have their defaults."""
    accumulation: int | None = None
    """Micro-batches per optimizer step."""
    checkpoint: int = 0
    """Blocks checkpointed."""
    blocks: int = 0
    """Blocks in the model."""
    precision: str = ""
    """The precision of the computation."""
    seconds: float | None = None
    """Seconds per optimizer step, modelled; None where the device's speed is not known."""
    samples_per_second: float | None = None
    """Samples per second, modelled."""
    bottleneck: str = ""
    """What takes most of a micro-batch's time."""


@dataclass(frozen=True)
class Comparison:
    """A training compared across devices, the best first."""

    model: str
    """The model's class."""
    parameters: int
    """Elements in its parameters."""
    optimizer: str
    """The optimizer's class."""
    target_batch: int
    """Samples per optimizer step."""
    batch: str
    """What a sample is, in words; "" if not specified."""
    rows: tuple[DeviceRow, ...]
    """One row per device."""
    made: str
    """When the comparison was made, ISO 8601."""
    version: int = VERSION
    """Version of the JSON format."""

    def to_json(self) -> str:
        """Return the comparison as JSON."""
        return json.dumps({"comparison": "memfit", **strict(asdict(self))}, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the comparison to a ".json" file. Raises UsageError."""
        write_in_format(path, {".json": self.to_json})

    @staticmethod
    def from_json(text: str, source: str = "the text") -> Comparison:
        """Read a comparison from JSON. Raises UsageError."""
        return restored(Comparison, text, source, VERSION, "comparison")

    def __str__(self) -> str:
        """Return plain lines, one per device."""
        cells = [COLUMNS, *map(cells_of, self.shown())]
        wide = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
        lines = ["  ".join(_padded(row, wide)).rstrip() for row in cells]
        return "\n".join([self.headline(), "", *lines, "", *self.footnotes()])

    def print(self) -> None:
        """Print the comparison as a table on a terminal."""
        from rich.console import Console

        console = Console(soft_wrap=False)
        console.print(printable(self.headline()), markup=False, highlight=False)
        console.print()
        console.print(_table(self.shown()))
        console.print()
        console.print("\n".join(self.footnotes()), markup=False, highlight=False)

    def headline(self) -> str:
        """Return one line that says what is compared."""
        size = f"{format_count(self.parameters)} parameters"
        each = f", {self.batch}" if self.batch else ""
        return f"memfit  {self.model}, {size}, {self.optimizer}, {self.target_batch} samples per step{each}"

    def shown(self) -> tuple[DeviceRow, ...]:
        """Return the rows to display: all that fit, and of the others those that lack least."""
        return self.rows[: sum(row.fits for row in self.rows) + LACKING]

    def footnotes(self) -> list[str]:
        """Return how many devices fit, and where the numbers come from."""
        fitting, more = sum(row.fits for row in self.rows), len(self.rows) - len(self.shown())
        left_out = f"; {more} more that lack more are omitted (--save has them)" if more else ""
        return [
            f"fits on {fitting} of {count(len(self.rows), 'device')}{left_out}",
            "at most: upper bound of the process's peak; micro-batch x steps: samples per forward x accumulation steps",
            "none of them is here: memory is simulated, seconds are modelled from data sheets, not measured",
        ]


def in_order(rows: Sequence[DeviceRow]) -> tuple[DeviceRow, ...]:
    """Sort rows: those that fit by speed, then the others by missing bytes."""

    def place(row: DeviceRow) -> tuple[bool, float, int, str]:
        seconds = row.seconds if row.seconds is not None else float("inf")
        return not row.fits, seconds if row.fits else float(row.needs - row.limit), -row.memory, row.device

    return tuple(sorted(rows, key=place))


def cells_of(row: DeviceRow) -> tuple[str, ...]:
    """Return a row's table cells."""
    if not row.fits:
        needs = f"no, needs {format_at_least(row.needs)}"
        return (row.device, format_bytes(row.memory), needs, *[""] * (len(COLUMNS) - 3))
    return (
        row.device,
        format_bytes(row.memory),
        f"yes, {format_bytes(row.needs)}",
        f"{row.micro_batch} x {row.accumulation}",
        f"{row.checkpoint} of {row.blocks}" if row.blocks else "-",
        row.precision,
        "-" if row.seconds is None else format_seconds(row.seconds),
        "-" if row.samples_per_second is None else three_digits(row.samples_per_second),
        row.bottleneck or "-",
    )


def _padded(cells: tuple[str, ...], wide: list[int]) -> list[str]:
    return [cell.rjust(n) if i in NUMBERS else cell.ljust(n) for i, (cell, n) in enumerate(zip(cells, wide))]


def _table(rows: tuple[DeviceRow, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if index in NUMBERS else "left", no_wrap=index < 2, overflow="fold")
    for row in rows:
        cells = [Text(cell) for cell in cells_of(row)]
        cells[2].stylize("green" if row.fits else "dim")
        table.add_row(*cells)
    return table
