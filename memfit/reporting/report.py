"""The report of a run as one value: what was asked, what runs and what it costs.

The value does not know how it is printed: `terminal.py`, `markdown.py` and `html.py` are its views, and JSON is the value
itself. Not covered: ranks other than this one, except for their facts in `every`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version as installed_version
from pathlib import Path
from typing import Any

from memfit.hardware.budget import Budget
from memfit.planning.checkpointed import with_blocks
from memfit.planning.plan import Plan
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import timing_at
from memfit.profiling.timeline import Timeline
from memfit.reporting.facts import Allowance, BatchChange, BlockCost, Curve, Happening, Offer, Pace, RankFacts
from memfit.reporting.files import read_text, restored, strict, unreadable, write_in_format
from memfit.reporting.memory import block_costs, curve_of
from memfit.reporting.offers import drift, offers_for
from memfit.reporting.verification import Verification

VERSION = 1
"""Version of the report file format that this code writes; later versions are refused."""
LONGEST = 1000
"""Maximum characters of a message that are kept."""


@dataclass(frozen=True)
class Report:
    """Holds all that a view of a run needs. Print it, save it (".html", ".json", ".md") or load the JSON again."""

    plan: Plan
    """The plan that runs."""
    allowance: Allowance
    """The memory that the plan has to fit into."""
    asked: tuple[tuple[str, str], ...]
    """(lever, what the user asked for)."""
    script_precision: str
    """The precision that the script itself computes in."""
    ranks: int
    """Number of ranks that share the target batch."""
    iterations: int
    """Iterations that the script itself accumulates per optimizer step."""
    parameters: int | None
    """Elements in the model's parameters; None if not known."""
    block_count: int | None
    """Number of blocks in the model; None if not known."""
    script_blocks: tuple[str, ...]
    """Blocks that the script itself checkpoints."""
    batch_norms: tuple[str, ...]
    """Modules that keep statistics of their batches (BatchNorm)."""
    draws: tuple[str, ...]
    """Modules that draw random numbers in training, such as dropout."""
    blocks: tuple[BlockCost, ...]
    """What each block takes in one micro-batch; empty if not known."""
    curve: Curve | None
    """Memory over one step; None if not known."""
    drift: float
    """What one second timed while planning takes in training; 1 if nothing was measured in training."""
    offers: tuple[Offer, ...]
    """Other choices of one lever, and the memory and time they would take."""
    pace: Pace
    """Measured step times, loader waits and peak memory."""
    verification: Verification | None
    """The comparison with the whole batch; None if not made."""
    events: tuple[Happening, ...]
    """What happened, in order."""
    notes: tuple[str, ...]
    """What the reader should know about these numbers."""
    software: tuple[tuple[str, str], ...]
    """(package, version)."""
    made: str
    """When the report was made, ISO 8601."""
    version: int = VERSION
    """Version of the file format."""
    change: BatchChange | None = None
    """The batch size against the script's; None if it is the script's or not known."""
    every: tuple[RankFacts, ...] = ()
    """Facts of all processes, by rank, as of their latest exchange; empty in one process."""

    @property
    def fits(self) -> bool:
        """Whether the plan's upper bound stays within the budget."""
        return self.room >= 0

    @property
    def room(self) -> int:
        """The headroom: bytes free above the plan's upper bound."""
        return self.allowance.limit - self.allowance.margin - self.plan.held - self.plan.predicted.upper

    def to_json(self) -> str:
        """Return the report as JSON, for `Report.load`."""
        return json.dumps({"report": "memfit", **strict(asdict(self))}, indent=1, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Return the report as Markdown, for an issue or a pull request."""
        from memfit.reporting.markdown import markdown

        return markdown(self)

    def to_html(self) -> str:
        """Return the report as one HTML page that needs no network; about 5 MB, because it contains the charts' code."""
        from memfit.reporting.html import page

        return page(self)

    def save(self, path: str | Path) -> None:
        """Write the report in the format of the suffix: ".html", ".json" or ".md".

        Raises UsageError for another suffix, or if the file cannot be written; it never leaves a half-written file.
        """
        write_in_format(path, {".html": self.to_html, ".json": self.to_json, ".md": self.to_markdown})

    @staticmethod
    def load(path: str | Path) -> Report:
        """Read a report from the JSON file it was saved to. Raises UsageError for a damaged, foreign or later file."""
        return Report.from_json(read_text(Path(path)), source=str(path))

    @staticmethod
    def from_json(text: str, source: str = "the text") -> Report:
        """Read a report from JSON. Raises UsageError, or PlanFileError for the plan inside."""
        report = restored(Report, text, source, VERSION)
        curve = report.curve
        if curve is not None and not (curve.moments and all(len(s) == len(curve.events) for _, s in curve.layers)):
            raise unreadable(source, "the layers of its curve have different lengths")
        change = report.change
        if change is not None and min(change.before, change.now) < 1:
            raise unreadable(source, "a batch in it has no samples")
        return report

    def print(self) -> None:
        """Print the report on stdout, in colour on a terminal."""
        from memfit.reporting.terminal import show

        show(self)

    def __str__(self) -> str:
        from memfit.reporting.terminal import plain

        return plain(self)

    def _repr_html_(self) -> str:
        from memfit.reporting.html import summary

        return summary(self)


def make_report(
    *,
    plan: Plan,
    profile: Profile | None,
    budget: Budget,
    events: Sequence[Any],
    stats: Mapping[str, Any],
    seconds: Sequence[float],
    waits: Sequence[float],
    asked: Mapping[str, str],
    verification: Verification | None,
    script_precision: str,
    draws: Sequence[str] = (),
    change: BatchChange | None = None,
    every: Sequence[RankFacts] = (),
) -> Report:
    """Build the report of a run.

    `profile` is the profile behind the plan, None if the plan came from a file. `events` have `.step`, `.kind` and
    `.message`. `stats` comes from `Run.stats()`, and may contain "ranks". `seconds` and `waits` are of the latest
    optimizer steps and batches. `asked` is what the user asked of each lever; its "script_accumulation" counts the
    script's own iterations per optimizer step. `draws` names the modules that draw random numbers. `change` is the
    batch against the script's. `every` is the processes that train together.
    """
    allowance = _allowance(budget)
    timeline = _timeline(plan, profile)
    room = allowance.limit - allowance.margin - plan.held - plan.predicted.upper
    return Report(
        plan=plan,
        allowance=allowance,
        asked=tuple((str(lever), str(value)) for lever, value in asked.items()),
        script_precision=script_precision,
        ranks=len(every) or int(stats.get("ranks") or 1),
        iterations=_count(asked.get("script_accumulation")),
        parameters=None if profile is None else profile.model.parameters,
        block_count=None if profile is None else len({*profile.blocks, *profile.script_blocks, *plan.checkpoint}),
        script_blocks=() if profile is None else profile.script_blocks,
        draws=tuple(map(str, draws)),
        batch_norms=() if profile is None else profile.batch_norms,
        blocks=() if profile is None or timeline is None else _blocks(plan, profile, timeline),
        curve=None if timeline is None else curve_of(timeline, plan.micro_batch, accumulates=plan.accumulation > 1),
        drift=drift(plan, profile),
        offers=_offers(plan, profile, room, events),
        pace=_pace(stats, seconds, waits),
        verification=verification,
        events=happenings(events),
        notes=tuple(dict.fromkeys((*plan.notes, *(() if profile is None else profile.notes)))),
        software=software(),
        made=made_now(),
        change=change,
        every=tuple(every),
    )


def _allowance(budget: Budget) -> Allowance:
    device, notes = budget.device, (*budget.notes, *budget.device.notes)
    return Allowance(budget.limit, budget.margin, budget.source, device.name, device.kind, notes, device.here)


def _timeline(plan: Plan, profile: Profile | None) -> Timeline | None:
    """The timeline of the step as the plan runs it."""
    if profile is None or profile.timeline is None:
        return None
    return profile.timeline if profile.checkpoint == plan.checkpoint else with_blocks(profile, plan.checkpoint).timeline


def _blocks(plan: Plan, profile: Profile, timeline: Timeline) -> tuple[BlockCost, ...]:
    names = tuple(dict.fromkeys((*profile.blocks, *profile.script_blocks, *profile.checkpoint)))
    seconds = dict(timing_at(profile.timings, plan.micro_batch).blocks) if profile.timings else {}

    def complete(cost: BlockCost) -> BlockCost:
        each = seconds.get(cost.name)
        who = "memfit" if cost.name in plan.checkpoint else "the script" if cost.name in profile.script_blocks else ""
        return replace(cost, recompute=None if each is None else max(0.0, each) * plan.accumulation, checkpointed=who)

    return tuple(complete(cost) for cost in block_costs(timeline, plan.micro_batch, names))


def _offers(plan: Plan, profile: Profile | None, room: int, events: Sequence[Any]) -> tuple[Offer, ...]:
    """What other choices would need; no larger micro-batch than the plan's once memory has run out."""
    most = plan.micro_batch if any(event.kind == "out of memory" for event in events) else plan.share
    return tuple(offer for offer in offers_for(plan, profile, room) if offer.micro_batch <= most)


def _pace(stats: Mapping[str, Any], seconds: Sequence[float], waits: Sequence[float]) -> Pace:
    rate, peak = stats.get("samples_per_second"), stats.get("peak_measured")
    return Pace(
        steps=int(stats.get("step") or 0),
        seconds=tuple(float(s) for s in seconds),
        waits=tuple(float(s) for s in waits),
        samples_per_second=None if rate is None else float(rate),
        peak=None if peak is None else int(peak),
    )


def _count(text: str | None) -> int:
    return int(text) if text is not None and str(text).isdigit() and int(text) > 0 else 1


def happenings(events: Sequence[Any]) -> tuple[Happening, ...]:
    """Convert events to the form that a report keeps."""
    return tuple(Happening(int(e.step), str(e.kind), str(e.message)[:LONGEST]) for e in events)


def made_now() -> str:
    """Return the current time in ISO 8601, as a report keeps it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def software() -> tuple[tuple[str, str], ...]:
    """Return (package, version) of what a report depends on."""
    found = []
    for package in ("memfit", "torch", "numpy"):
        try:
            found.append((package, installed_version(package)))
        except PackageNotFoundError:  # memfit runs from a checkout
            continue
    return tuple(found)
