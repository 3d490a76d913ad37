"""A profile at one size of micro-batch as a report: what the step takes, where it is at its fullest, whose that is.

The value does not know how it is printed: `profile_terminal.py`, `profile_html.py`, `profile_json.py` and `profile_markdown.py`
are views of it. Not covered: choosing a size; that is what a plan does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memfit.profiling.explain import Explanation
from memfit.profiling.profile import Profile
from memfit.profiling.telling import DEPTH
from memfit.profiling.timeline import Timeline
from memfit.profiling.tree import ModuleTree
from memfit.reporting.facts import Curve
from memfit.reporting.files import write_in_format
from memfit.reporting.memory import curve_of
from memfit.reporting.report import made_now, software


@dataclass(frozen=True)
class ProfileReport:
    """A profile, explained for micro-batches of one size. Print it, save it (".html", ".json", ".md")."""

    profile: Profile
    """What the step costs at any size."""
    explanation: Explanation
    """The peak at this one."""
    tree: ModuleTree
    """What each module costs at this one."""
    curve: Curve | None
    """Memory over one step; None if not known."""
    depth: int
    """Levels of modules that are shown below the model, where that cannot be unfolded."""
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
        """The step at this size; None if not known."""
        return self.profile.traced_at(self.samples)

    @property
    def where(self) -> str:
        """The device, in words."""
        card = self.profile.card
        return self.profile.device if card is None else f"{card.title}, which is not here"

    def to_html(self) -> str:
        """One page that needs no network; about 5 MB, because the charts' code is inside."""
        from memfit.reporting.profile_html import page

        return page(self)

    def to_json(self) -> str:
        """Every allocation and operation as JSON, one line each; `profile_json.py` says what the fields mean."""
        from memfit.reporting.profile_json import to_json

        return to_json(self)

    def to_markdown(self) -> str:
        """Markdown, for an issue or a pull request."""
        from memfit.reporting.profile_markdown import markdown

        return markdown(self)

    def save(self, path: str | Path) -> None:
        """Write it in the format of the suffix: ".html", ".json" or ".md".

        Raises UsageError for another suffix and where the file cannot be written; nothing is half-written then.
        """
        write_in_format(path, {".html": self.to_html, ".json": self.to_json, ".md": self.to_markdown})

    def print(self) -> None:
        """Print it on stdout, in colour on a terminal."""
        from memfit.reporting.profile_terminal import show

        show(self)

    def __str__(self) -> str:
        from memfit.reporting.profile_terminal import plain

        return plain(self)


def profile_report(profile: Profile, micro_batch: int, *, accumulates: bool = True, depth: int = DEPTH) -> ProfileReport:
    """The report of a profile for micro-batches of that many samples. Raises UsageError for what is no such number."""
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
