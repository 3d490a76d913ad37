"""What `wrap` says once a plan exists: a line for the user, or the plan for the command line that asked for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfit._arguments import length_of
from memfit._asked import Asked, PlanReady
from memfit._tested import untested
from memfit.reporting.stderr import tell
from memfit.runtime.core import Core
from memfit.training.run import Run


def tell_of_plans(run: Run, core: Core, asked: Asked | None, *, in_script: bool) -> None:
    """Set what happens once a plan exists: the command line takes it, or script mode prints one line."""
    outside = untested(torch.__version__)
    if outside is not None:
        core.note("note", outside)
    if asked is not None:
        asked.on_wrap(run)
    if asked is not None and asked.stop:
        core.in_force.on_plan = partial(_stop, run)
    elif in_script:
        core.in_force.on_plan = partial(_announce, core)


def _stop(run: Run) -> None:
    raise PlanReady(run)


def say_plan(run: Run, loader: Any, target_batch: int | None) -> None:
    """Print the plan to stderr, on rank 0 only. stdout stays free for scripts whose output is parsed."""
    if not run.is_first:
        return
    lines = [run.plan.summary()] if run.plan is not None else []
    before, now = length_of(loader), length_of(run.loader)
    if before is not None and now is not None and before != now:
        lines.append(
            f"the loader now has {now} iterations per epoch, not {before}; schedulers built before were sized by the "
            "old number"
        )
    there = length_of(getattr(loader, "dataset", None))
    if target_batch is not None and there is not None and target_batch > there:
        lines.append(f"target_batch={target_batch} exceeds the {there} samples: one batch per epoch")
    for line in lines:
        tell(line)


def _announce(core: Core) -> None:
    """Print the plan made inside the first training call. Later plans are events."""
    assert core.plan is not None
    core.in_force.on_plan = lambda: None
    if core.settings.rank == 0:
        tell(core.plan.summary())
