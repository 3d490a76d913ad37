"""Reads and writes plans and reports, and prints them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from memfit._errors import UsageError
from memfit.autotune.absent_device import is_elsewhere
from memfit.hardware.budget import Budget
from memfit.hardware.device import Device
from memfit.planning.plan import Plan
from memfit.reporting.cards import Comparison
from memfit.reporting.files import read_text, write_text
from memfit.reporting.report import Report, make_report


def show(report: Report | Comparison) -> None:
    """Print a report on stdout: as wide as the terminal, or as plain text without one."""
    if sys.stdout.isatty():
        report.print()
    else:
        print(report, flush=True)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan file. Raises UsageError with the system's reason."""
    write_text(path, plan.to_json(), "the plan")


def read_saved(path: Path) -> Report | Comparison:
    """Read a report, a comparison or a report of a plan from a file. Raises UsageError or PlanFileError for any other file."""
    text = read_text(path)
    kind = _kind(text, path)
    if kind == "report":
        return Report.from_json(text, source=str(path))
    if kind == "comparison":
        return Comparison.from_json(text, source=str(path))
    return report_of(Plan.from_json(text, source=str(path)), path)


def report_of(plan: Plan, path: Path) -> Report:
    """Build the report of a plan that has not run yet, from its file alone."""
    here = not is_elsewhere(plan.notes)
    device = Device("", None, plan.device, total=plan.limit, free=plan.limit, held=plan.held, here=here)
    return make_report(
        plan=plan,
        profile=None,
        budget=Budget(plan.limit, plan.held, plan.margin, f"as {path.name} says", device),
        events=(),
        stats={},
        seconds=(),
        waits=(),
        asked={},
        verification=None,
        script_precision="the script's",
    )


def _kind(text: str, path: Path) -> str:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _neither(path, f"it is not JSON ({error})") from error
    for kind in ("report", "comparison"):
        if isinstance(data, dict) and kind in data:
            return kind
    if isinstance(data, dict) and "micro_batch" in data:
        return "plan"
    raise _neither(path, "it is JSON, but neither a plan nor a report")


def _neither(path: Path, found: str) -> UsageError:
    return UsageError(
        f"reading {str(path)!r}",
        found=found,
        next_move="name a file saved with memfit plan --save, plan.save(path) or run.report().save('report.json')",
    )
