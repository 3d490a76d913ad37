"""The report: what was asked, what is done and what it costs, as one value that views are made of.

The value does not know how it is printed: `terminal.py`, `markdown.py` and `html.py` are views of it, JSON is the value
itself. Not covered: other ranks than this one.
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
from memfit.planning.plan import Plan
from memfit.planning.search import with_blocks
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import timing_at
from memfit.profiling.timeline import Timeline
from memfit.reporting.facts import Allowance, BatchChange, BlockCost, Curve, Happening, Offer, Pace, RankFacts
from memfit.reporting.files import read_text, restored, strict, unreadable, write_in_format
from memfit.reporting.memory import block_costs, curve_of
from memfit.reporting.offers import drift, offers_for
from memfit.reporting.verification import Verification

VERSION = 1
"""Version of the report file format this code writes; later ones are refused."""
LONGEST = 1000
"""Characters of a message that are kept."""


@dataclass(frozen=True)
class Report:
    """All that a view of a run needs. Print it, save it (".html", ".json", ".md"), load the JSON again."""

    plan: Plan
    """What runs."""
    allowance: Allowance
    """What it has to fit into."""
    asked: tuple[tuple[str, str], ...]
    """(lever, what the user asked of it)."""
    script_precision: str
    """The precision the script computes in by itself."""
    ranks: int
    """Processes that share the target batch."""
    iterations: int
    """Iterations that the script itself adds up per optimizer step."""
    parameters: int | None
    """Elements in the model's parameters; None if not known."""
    block_count: int | None
    """Blocks that the model has; None if not known."""
    script_blocks: tuple[str, ...]
    """Blocks that the script checkpoints itself."""
    batch_norms: tuple[str, ...]
    """Modules that keep statistics of their batches."""
    draws: tuple[str, ...]
    """Modules that draw random numbers while training: dropout."""
    blocks: tuple[BlockCost, ...]
    """What each block takes in a micro-batch; empty if not known."""
    curve: Curve | None
    """Memory over one step; None if not known."""
    drift: float
    """What a second timed while planning comes to while training; 1 where nothing was measured anew."""
    offers: tuple[Offer, ...]
    """What other choices would need and take."""
    pace: Pace
    """What was measured."""
    verification: Verification | None
    """The comparison with the whole batch; None if it was not made."""
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
    """The batch against the script's; None where it is the script's, or where that is not known."""
    every: tuple[RankFacts, ...] = ()
    """All processes, by rank, as they last told each other; empty in one process."""

    @property
    def fits(self) -> bool:
        """Whether the plan stays within the budget by its upper bound."""
        return self.room >= 0

    @property
    def room(self) -> int:
        """Bytes left above the plan's upper bound."""
        return self.allowance.limit - self.allowance.margin - self.plan.held - self.plan.predicted.upper

    def to_json(self) -> str:
        """The report as JSON, for `Report.load`."""
        return json.dumps({"report": "memfit", **strict(asdict(self))}, indent=1, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The report as Markdown, for an issue or a pull request."""
        from memfit.reporting.markdown import markdown

        return markdown(self)

    def to_html(self) -> str:
        """The report as one page that needs no network; about 5 MB, because the charts' code is inside."""
        from memfit.reporting.html import page

        return page(self)

    def save(self, path: str | Path) -> None:
        """Write the report in the format of the suffix: ".html", ".json" or ".md".

        Raises UsageError for another suffix and where the file cannot be written; nothing is half-written then.
        """
        write_in_format(path, {".html": self.to_html, ".json": self.to_json, ".md": self.to_markdown})

    @staticmethod
    def load(path: str | Path) -> Report:
        """Read a report from the JSON file it was saved to. Raises UsageError for a damaged, foreign or later one."""
        return Report.from_json(read_text(Path(path)), source=str(path))

    @staticmethod
    def from_json(text: str, source: str = "the text") -> Report:
        """Read a report from JSON. Raises UsageError, and PlanFileError for the plan inside."""
        report = restored(Report, text, source, VERSION)
        curve = report.curve
        if curve is not None and not (curve.moments and all(len(s) == len(curve.events) for _, s in curve.layers)):
            raise unreadable(source, "the layers of its curve have different lengths")
        change = report.change
        if change is not None and min(change.before, change.now) < 1:
            raise unreadable(source, "a batch in it has no samples")
        return report

    def print(self) -> None:
        """Print it on stdout, in colour on a terminal."""
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
    """The report of a run.

    `profile` is the one the plan rests on, None if the plan came from a file. `events` have `.step`, `.kind` and
    `.message`; `stats` are those of `Run.stats()`, and may name "ranks". `seconds` and `waits` are those of the last
    optimizer steps and batches. `asked` is what the user asked of each lever; "script_accumulation" among it counts the
    script's own iterations per optimizer step. `draws` are the names of modules that draw random numbers;
    `change` is the batch against the script's; `every` are the processes that train together.
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
    """The step as the plan runs it."""
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
    """What other choices would need; none larger than the plan's where memory has run out before."""
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
    """Events as a report keeps them."""
    return tuple(Happening(int(e.step), str(e.kind), str(e.message)[:LONGEST]) for e in events)


def made_now() -> str:
    """The time, as a report keeps it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def software() -> tuple[tuple[str, str], ...]:
    """(package, version) of what a report depends on."""
    found = []
    for package in ("memfit", "torch", "numpy"):
        try:
            found.append((package, installed_version(package)))
        except PackageNotFoundError:  # run from a checkout
            continue
    return tuple(found)


def made_with(made: str, packages: Sequence[tuple[str, str]]) -> str:
    """When, and with what, in words."""
    versions = ", ".join(f"{package} {version}" for package, version in packages)
    return f"made {made}" + (f" with {versions}" if versions else "")
