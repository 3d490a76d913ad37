"""The report of a run without a plan: memfit was off, or everything ran as the script wrote it.

It has the same views as a `Report`, each a few lines. Not covered: the memory of plain steps, which is not measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import median

from memfit._units import format_seconds
from memfit.reporting.facts import Happening
from memfit.reporting.files import strict, write_in_format
from memfit.reporting.markdown import escaped
from memfit.reporting.words import printable

SWITCHED_ON_BY = {
    "enabled=False": "wrap with enabled=True",
    "MEMFIT=off in the environment": "unset MEMFIT",
    "run.undo()": "wrap again",
}
"""How to switch memfit on again, by the reason why it is off."""


def what_ran(off: str, calls: int, steps: int) -> tuple[str, str] | None:
    """Return (what ran without a plan, what to do to get one) after that many training calls and steps; None if nothing ran
    yet. `off` says why memfit is off, "" means that it is on."""
    if off:
        return f"off ({off}): everything runs as the script wrote it", SWITCHED_ON_BY[off]
    if calls:
        return "ran whole, as the script wrote it: there was nothing to cut", "larger batches (target_batch=) get a plan"
    if steps:
        return (
            "ran as the script wrote it: the wrapped model was never called while gradients were recorded",
            "call the model that memfit.wrap returned, outside torch.no_grad()",
        )
    return None


@dataclass(frozen=True)
class PlainReport:
    """Reports what ran instead of a plan, and why. Print it or save it (".html", ".json", ".md")."""

    model: str
    """The model's class."""
    happened: str
    """What ran, in one sentence."""
    next_move: str
    """What to do to get a plan."""
    steps: int | None
    """Optimizer steps done; None if they were not counted."""
    seconds: tuple[float, ...]
    """Seconds of each of the latest optimizer steps that were timed."""
    events: tuple[Happening, ...]
    """Events of the run, in order."""
    software: tuple[tuple[str, str], ...]
    """(package, version)."""
    made: str
    """When the report was made, ISO 8601."""

    def lines(self) -> tuple[tuple[str, str], ...]:
        """Return (label, text) of each line of the report."""
        found = [("plain", self.happened)]
        if self.steps is not None:
            took = f", {format_seconds(median(self.seconds))} each" if self.seconds else ""
            found.append(("steps", f"{self.steps}{took}"))
        found += [(event.kind, f"step {event.step}: {event.message}") for event in self.events]
        return (*found, ("next", self.next_move))

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"report": "memfit without a plan", **strict(asdict(self))}, indent=1, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Return the report as Markdown."""
        entries = [f"- **{escaped(label)}**: {escaped(text)}" for label, text in self.lines()]
        return "\n".join([f"# memfit: {escaped(self.model)}, plain", "", *entries, "", f"*{escaped(self._made())}*", ""])

    def to_html(self) -> str:
        """Return the report as one HTML page that needs no network."""
        title = escape(f"memfit: {self.model}, plain")
        head = f'<meta charset="utf-8"><title>{title}</title>'
        return f"<!doctype html>\n<html><head>{head}</head><body><h1>{title}</h1>{self._repr_html_()}</body></html>\n"

    def save(self, path: str | Path) -> None:
        """Write the report in the format of the suffix: ".html", ".json" or ".md". Raises UsageError as `Report.save` does."""
        write_in_format(path, {".html": self.to_html, ".json": self.to_json, ".md": self.to_markdown})

    def print(self) -> None:
        """Print the report on stdout."""
        print(self)

    def __str__(self) -> str:
        entries = [f"{printable(label):<14} {printable(text)}" for label, text in self.lines()]
        return "\n".join([f"memfit  {printable(self.model)}", "", *entries])

    def _repr_html_(self) -> str:
        rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in self.lines())
        return f"<dl>{rows}</dl><p>{escape(self._made())}</p>"

    def _made(self) -> str:
        versions = ", ".join(f"{package} {version}" for package, version in self.software)
        return f"made {self.made}" + (f" with {versions}" if versions else "")
