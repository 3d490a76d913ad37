"""Reports why a step cannot run on fake tensors, as one exception with the reason and its source line.

Any exception counts, because a real run need not raise it: a fake tensor has no values, is of another type than Tensor, and
operators without a shape function reject it. Not covered: whatever terminates the process.
"""

from __future__ import annotations

import dis
import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from memfit._errors import MemfitError
from memfit.tracing.fake import FakeWorld

_TORCH, _OURS = (str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


class TraceFailed(Exception):
    """Raised if the step cannot run on fake tensors; `reason` says why, and at which line."""

    def __init__(self, reason: str, *, guessed: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.guessed = reason, guessed


@contextmanager
def telling_failures(world: FakeWorld) -> Iterator[None]:
    """Converts whatever is raised on fake tensors to TraceFailed, because the same step on real tensors need not raise it. A
    real run afterwards raises the user's own errors. Errors that memfit raises itself pass unchanged."""
    try:
        with _unlogged():
            yield
    except (TraceFailed, MemfitError):
        raise
    except Exception as error:
        raise TraceFailed(_reason(error, world), guessed=bool(world.guesses)) from error


@contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs errors of fake operators with their stack; here they are an expected result."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _reason(error: Exception, world: FakeWorld) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    what = f"{type(error).__name__}{f': {said}' if said else ''} (at {_place(error)})"
    return f"it depends on values, and with guessed values it raises {what}" if world.guesses else f"on fake tensors: {what}"


def _place(error: Exception) -> str:
    """The line that raised the error if it is memfit's own, else the innermost line outside of torch and memfit."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OURS, "<"))]
    ours = frames[-1].filename.startswith(_OURS)
    frame = theirs[-1] if theirs and not ours else frames[-1]
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}, line {frame.lineno}"


def is_ours(error: BaseException) -> bool:
    """Whether code of memfit raised the error, except in frames that only call the user's function."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename.startswith(_OURS) and frame.name not in ("__torch_function__", "loss")


def own_exception(failed: TraceFailed) -> BaseException | None:
    """Returns the exception that ended a trace if a `raise` of the user's or a library's code raised it, and torch did not. If
    the step cannot run for real, that exception is taken to be intended. None where values were guessed."""
    error = failed.__cause__
    last = None if error is None else error.__traceback__
    if last is None or failed.guessed:
        return None
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    raised = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return error if raised and not code.co_filename.startswith((_TORCH, _OURS)) else None
