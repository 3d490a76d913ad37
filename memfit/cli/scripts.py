"""Runs a training script until it has a plan, and stops it there.

The script runs as with `python script.py`: as `__main__`, with its own arguments and its own folder on the path.
Not covered: scripts that start their training in other processes.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit._asked import ASKED, Asked, PlanReady
from memfit._errors import UsageError
from memfit.cli.hosted import hosting
from memfit.reporting.report import Report
from memfit.training.run import Run

LINE = "model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=...)"


def planned_by_script(script: Path, arguments: Sequence[str], asked: Asked) -> Report:
    """Run `script` until its first plan, stop it there and return the report of the plan.

    Raises UsageError if it ends without a plan. Its own exceptions, and a SystemExit with a nonzero code, pass through.
    """
    runs: list[Run] = []
    with running_as_main(script, arguments) as module, hosting(script, elsewhere=asked.card is not None):
        report = stopped_at_plan(partial(_execute, script, module), replace(asked, on_wrap=runs.append))
    if report is None:  # it ended, or caught even a BaseException and went on
        report = next((_report_of(run) for run in runs if run.plan is not None), None)
    if report is None:
        raise _without_plan(script, wrapped=bool(runs))
    return report


def stopped_at_plan(work: Callable[[], object], asked: Asked) -> Report | None:
    """Run `work()` with the overrides for `memfit.wrap`; return the report of the plan it stopped at, None if it ended."""
    token = ASKED.set(asked)
    try:
        work()
        return None
    except PlanReady as ready:
        run, frames = ready.run, ready.__traceback__
    finally:
        ASKED.reset(token)
    traceback.clear_frames(frames)  # the frames keep loader iterators alive, and these their workers
    return _report_of(run)


def _report_of(run: Run) -> Report:
    found = run.report()
    assert isinstance(found, Report), "there is a plan"
    return found


@contextmanager
def running_as_main(script: Path, arguments: Sequence[str]) -> Iterator[ModuleType]:
    """Install a fresh `__main__`, the script's arguments and its folder on the path; restore everything afterwards."""
    module = ModuleType("__main__")
    module.__file__ = str(script)
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv, sys.modules["__main__"] = [str(script), *arguments], module
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with streams_kept():
            yield module
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restore stdout and stderr afterwards if the script closed them or set them to None."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    try:
        yield
    finally:
        for descriptor, (name, stream) in enumerate(before.items(), start=1):
            now = getattr(sys, name)
            if now is None or now.closed:
                setattr(sys, name, _opened_again(descriptor) if stream.closed else stream)


def _opened_again(descriptor: int) -> Any:
    """A new stream on the old one's file descriptor; if that is closed too, a stream that discards the output."""
    try:
        return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    except OSError:
        return io.StringIO()


def _execute(script: Path, module: ModuleType) -> None:
    with io.open_code(str(script.resolve())) as file:
        code = compile(file.read(), str(script), "exec", dont_inherit=True)
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _without_plan(script: Path, *, wrapped: bool) -> UsageError:
    if wrapped:
        return UsageError(
            f"the plan of {script.name}",
            found="it called memfit.wrap, but ended before the model was called to train",
            next_move="let it run at least one training step, or pass loss_fn= to memfit.wrap",
        )
    return UsageError(
        f"the plan of {script.name}",
        found="it ended without calling memfit.wrap",
        next_move=f"add this line before its training loop: {LINE}",
    )
