"""A profile at one micro-batch size as a report: what the step takes, where it peaks, and which modules hold the peak.

The value does not know how it is printed: `profile_terminal.py`, `profile_html.py`, `profile_json.py` and `profile_markdown.py`
are its views. Not covered: choosing a size, which a plan does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memfit.profiling.describe import DEPTH
from memfit.profiling.explain import Explanation
from memfit.profiling.profile import Profile
from memfit.profiling.timeline import Timeline
from memfit.profiling.tree import ModuleTree
from memfit.reporting.facts import Curve
from memfit.reporting.files import write_in_format
from memfit.reporting.memory import curve_of
from memfit.reporting.report import made_now, software


@dataclass(frozen=True)
class ProfileReport:
    """Explains a profile for micro-batches of one size. Print it or save it (".html", ".json", ".md")."""

    profile: Profile
    """What the step costs at any size."""
    explanation: Explanation
    """The peak at this size."""
    tree: ModuleTree
    """What each module costs at this size."""
    curve: Curve | None
    """Memory over one step; None if not known."""
    depth: int
    """Levels of modules shown below the model, in views that cannot unfold them."""
    software: tuple[tuple[str, str], ...]
    """(package, version)."""
    made: str
    """When the report was made, ISO 8601."""

    @property
    def samples(self) -> int:
        """Samples per micro-batch."""
        return self.explanation.samples

    @property
    def timeline(self) -> Timeline | None:
        """The allocations of the step at this size; None if not known."""
        return self.profile.traced_at(self.samples)

    @property
    def where(self) -> str:
        """The device, in words."""
        card = self.profile.card
        return self.profile.device if card is None else f"{card.title}, which is not here"

    def to_html(self) -> str:
        """Return one HTML page that needs no network; about 5 MB, because it contains the charts' code."""
        from memfit.reporting.profile_html import page

        return page(self)

    def to_json(self) -> str:
        """Return every allocation and operation as JSON, one line each; `profile_json.py` says what the fields mean."""
        from memfit.reporting.profile_json import to_json

        return to_json(self)

    def to_markdown(self) -> str:
        """Return the profile as Markdown, for an issue or a pull request."""
        from memfit.reporting.profile_markdown import markdown

        return markdown(self)

    def save(self, path: str | Path) -> None:
        """Write the profile in the format of the suffix: ".html", ".json" or ".md".

        Raises UsageError for another suffix, or if the file cannot be written; it never leaves a half-written file.
        """
        write_in_format(path, {".html": self.to_html, ".json": self.to_json, ".md": self.to_markdown})

    def print(self) -> None:
        """Print the profile on stdout, in colour on a terminal."""
        from memfit.reporting.profile_terminal import show

        show(self)

    def __str__(self) -> str:
        from memfit.reporting.profile_terminal import plain

        return plain(self)


def profile_report(profile: Profile, micro_batch: int, *, accumulates: bool = True, depth: int = DEPTH) -> ProfileReport:
    """Build the report of a profile for that micro-batch size. Raises UsageError for an invalid number of samples."""
    explanation = profile.explain(micro_batch, accumulates=accumulates)
    timeline = profile.traced_at(micro_batch)
    return ProfileReport(
        profile=profile,
        explanation=explanation,
        tree=profile.tree(micro_batch, accumulates=accumulates),
        curve=None if timeline is None else curve_of(timeline, micro_batch, accumulates=accumulates),
        depth=depth,
        software=software(),
        made=made_now(),
    )
