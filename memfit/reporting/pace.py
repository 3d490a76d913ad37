"""Computes how long steps take and wait for the loader, from measurements.

Not covered: how a step spends its time; the profile times that.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from memfit.planning.plan import Option
from memfit.reporting.facts import Pace

if TYPE_CHECKING:
    from memfit.reporting.report import Report

CHANGES = ("plan", "replan", "out of memory")
"""Kinds of events after which another plan may be in force."""


def steady(report: Report) -> tuple[float, ...]:
    """Return the seconds of the steps since the plan last changed, or of all known steps if there is none since."""
    pace = report.pace
    changed = max((event.step for event in report.events if event.kind in CHANGES and event.step), default=-1)
    since = pace.steps - changed - 1  # the plan changed during or before step number `changed`, counted from 0
    return pace.seconds[-since:] if 0 < since < len(pace.seconds) else pace.seconds


def not_run_yet(report: Report) -> bool:
    """Whether no step has run with this plan yet, so that nothing has happened in it."""
    return not report.pace.steps and not report.pace.seconds


def seconds_of(option: Option, report: Report) -> float | None:
    """Return an option's seconds per step, comparable with all others: those timed while planning are scaled by the drift."""
    seconds = option.cost.seconds
    return seconds if seconds is None or option.measured else seconds * report.drift


def asked_seconds(report: Report) -> float | None:
    """Return the seconds per step with the script's own settings, comparable with the plan's."""
    seconds, drift = report.plan.asked.seconds, 1.0 if report.plan.by_size else report.drift
    return None if seconds is None else seconds * drift


def loader_share(report: Report) -> float | None:
    """Return the fraction of the time from batch to batch spent waiting for the loader; None if not measured."""
    seconds = steady(report)
    if not seconds or not report.pace.waits:
        return None
    wait, step = typical_wait(report.pace), median(seconds)
    return wait / (wait + step) if wait + step > 0 else 0.0


def typical_wait(pace: Pace) -> float:
    """Return the median wait for a batch in seconds. The first, which starts the workers, counts only if it is the only one."""
    return median(pace.waits[1:] or pace.waits)
