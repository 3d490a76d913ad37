"""Writes a profile as readable JSON: one line for every allocation and every operation.

The file has a `version` (VERSION); within a version, fields are added, never changed. FIELDS describes the fields, and each
file contains it under "fields". Allocations and operations are given for every size: `fixed + per_sample * n` at n samples per
micro-batch (if a micro-batch of one sample runs differently, for that size alone). "explanation" and "tree" are for the one
size under "samples". Not covered: reading it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memfit.profiling.allocator import Peak
from memfit.profiling.explain import made_by
from memfit.profiling.seconds import Timing
from memfit.profiling.timeline import CATEGORIES, Timeline
from memfit.profiling.tree import ModuleCost
from memfit.reporting.files import strict

if TYPE_CHECKING:
    from memfit.reporting.profiled import ProfileReport

VERSION = 1
"""Version of the format."""
FIELDS = {
    "samples": "samples per micro-batch that peak, explanation and tree are for",
    "peak": "bytes; allocated: by tensors or a card's allocator; expected, upper: what the device holds, probably and at most",
    "explanation": "where the step peaks, and what lies there; sizes in bytes",
    "evaluation": "as peak, of an evaluation with batches of that many samples; null if not asked for or not known",
    "tree": "modules, nested; alike: how many an entry stands for, all together; kept, transient, holds: bytes",
    "phases": "stretches of the step, with the event that each begins with; present is what exists before it",
    "micro_batches": "the events at which the traced micro-batches begin; the second stands for all further ones",
    "allocations": "storages in order of birth; fixed and per_sample: bytes; born, died: events, -1 for what survives the step",
    "operations": "in order; event: the one that was next when it began; flops and moved (bytes), fixed and per sample",
    "timings": "micro-batches as timed or modelled, in seconds; told_from: the size they derive from, or null",
}
"""What each field of the file means."""


def to_json(report: ProfileReport) -> str:
    """Return the whole file as text."""
    lines = [f" {json.dumps(key)}: {_readable(key, value)}" for key, value in _head(report).items()]
    for name, entries in (("allocations", _allocations(report)), ("operations", _operations(report))):
        rows = ",\n".join(f"  {_compact(entry)}" for entry in entries)
        lines.append(f' "{name}": [\n{rows}\n ]' if rows else f' "{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _timing(timing: Timing) -> dict[str, Any]:
    return {
        "samples": timing.samples,
        "seconds": timing.seconds,
        "forward": timing.forward,
        "told_from": timing.told_from or None,
    }


def _readable(key: str, value: Any) -> str:
    """JSON on one line, except for nested or long values."""
    if key not in ("fields", "explanation", "tree"):
        return _compact(value)
    return json.dumps(strict(value), indent=1, allow_nan=False).replace("\n", "\n ")


def _compact(value: Any) -> str:
    return json.dumps(strict(value), allow_nan=False)


def _head(report: ProfileReport) -> dict[str, Any]:
    profile, timeline = report.profile, report.timeline
    return {
        "profile": "memfit",
        "version": VERSION,
        "fields": FIELDS,
        "made": report.made,
        "software": dict(report.software),
        "model": asdict(profile.model),
        "device": profile.device,
        "card": None if profile.card is None else profile.card.name,
        "precision": profile.precision,
        "checkpoint": profile.checkpoint,
        "source": profile.source,
        "notes": profile.notes,
        "samples": report.samples,
        "peak": _peak(report.explanation.peak, report.explanation.smallest_budget),
        "evaluation": _evaluation(report),
        "explanation": _explanation(report),
        "tree": {"seconds_are": report.tree.seconds_are, "root": _module(report.tree.root)},
        "timings": [_timing(timing) for timing in profile.timings],
        "optimizer_seconds": profile.optimizer_seconds,
        "phases": [] if timeline is None else [{"name": p.name, "start": p.start} for p in timeline.phases],
        "micro_batches": [] if timeline is None else timeline.window,
    }


def _peak(peak: Peak, least: int | None) -> dict[str, int | None]:
    names = ("allocated", "expected", "upper", "reserved", "driver")
    return {**{name: getattr(peak, name) for name in names}, "smallest_budget": least}


def _evaluation(report: ProfileReport) -> dict[str, Any] | None:
    found = report.explanation.evaluation
    if found is None:
        return None
    least = None if found.peak.narrowest is None else found.peak.smallest_budget
    return {"samples": found.samples, "exceeds_training": found.exceeds, **_peak(found.peak, least)}


def _explanation(report: ProfileReport) -> dict[str, Any]:
    found = report.explanation
    return {
        "tensors": found.tensors,
        "moment": None if found.moment is None else asdict(found.moment),
        "holds": dict(found.holds),
        "modules": [{"module": s.module, "alike": s.alike, "size": s.size, "holds": dict(s.holds)} for s in found.modules],
        "largest": [asdict(one) for one in found.largest],
        "unknown": found.unknown,
    }


def _module(cost: ModuleCost) -> dict[str, Any]:
    plain = {key: value for key, value in cost.__dict__.items() if key not in ("holds", "differ", "children")}
    return {**plain, "holds": dict(cost.holds), "children": [_module(child) for child in cost.children]}


def _allocations(report: ProfileReport) -> Iterator[dict[str, Any]]:
    timeline = report.timeline
    if timeline is None:
        return
    born, died = timeline.lifetimes()
    last = len(timeline.event)
    for i in range(len(timeline.fixed)):
        yield {
            "fixed": _number(timeline.fixed[i]),
            "per_sample": _number(timeline.per_sample[i]),
            "category": CATEGORIES[int(timeline.category[i])],
            "module": timeline.owners[int(timeline.owner[i])],
            "operation": made_by(timeline, i),
            "born": int(born[i]),
            "died": int(died[i]) if died[i] < last else -1,
            "phase": timeline.phase_of(int(born[i])),
        }


def _operations(report: ProfileReport) -> Iterator[dict[str, Any]]:
    timeline = report.timeline
    if timeline is None or timeline.operations is None:
        return
    found = timeline.operations
    for i in range(len(found.event)):
        operation, dtype = found.kinds[int(found.kind[i])]
        yield {
            "operation": operation,
            "dtype": dtype,
            "module": found.owners[int(found.owner[i])],
            "event": int(found.event[i]),
            "phase": _phase_at(timeline, int(found.event[i])),
            "flops": _number(found.flops[i]),
            "flops_per_sample": _number(found.flops_per_sample[i]),
            "moved": _number(found.moved[i]),
            "moved_per_sample": _number(found.moved_per_sample[i]),
        }


def _phase_at(timeline: Timeline, event: int) -> str:
    return timeline.phase_of(min(event, len(timeline.event)))


def _number(value: float) -> int | float:
    """A number; whole ones have no decimal point."""
    return int(value) if float(value).is_integer() else float(value)
