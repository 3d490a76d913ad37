"""Faults of memfit itself: told apart from errors of the user's code, and written to a file that can be attached to an issue.

They do not stop a script that would run in plain PyTorch; MEMFIT=strict in the environment raises them instead.
"""

from __future__ import annotations

import os
import platform
import tempfile
import traceback
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memfit._errors import MemfitError
from memfit.hardware.exhausted import is_out_of_memory

if TYPE_CHECKING:
    from memfit.runtime.core import Core

_OURS = str(Path(__file__).parents[1]) + os.sep
_CALLING = frozenset(("__torch_function__", "loss", "output", "of", "told", "_value", "answer"))
"""Functions of memfit that call user code: what is raised in their frames is not memfit's fault."""
_NUMBERS = count()


def strict() -> bool:
    """Return whether faults are raised."""
    return os.environ.get("MEMFIT", "").lower() == "strict"


def is_fault(error: BaseException) -> bool:
    """Return whether memfit's own code raised the error, and it is neither a refusal nor an out-of-memory error."""
    if isinstance(error, MemfitError) or is_out_of_memory(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS) and frames[-1].name not in _CALLING


def report_fault(core: Core, error: BaseException) -> Path | None:
    """Write what is known of a fault to a file, without any data, and return its path. None if the error is no fault, or the
    file cannot be written. Raises the fault itself in strict mode."""
    if not is_fault(error):
        return None
    if strict():
        raise error
    path = Path(tempfile.gettempdir()) / f"memfit-fault-{os.getpid()}-{next(_NUMBERS)}.txt"
    try:
        path.write_text(_told(core, error))
    except Exception:  # of whatever is told: the fault itself must not end the script
        core.tell(f"memfit failed here ({type(error).__name__}: {error})")
        return None
    core.tell(f"memfit failed here ({type(error).__name__}); attach this to an issue: {path}")
    return path


def _told(core: Core, error: BaseException) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("memfit")
    except PackageNotFoundError:
        own = "from a checkout"
    lines = (
        f"memfit {own}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"model {type(core.model).__name__}, optimizer {type(core.optimizer).__name__}, device {core.device}",
        f"settings {core.settings}",
        f"plan {core.plan}",
        "events:",
        *(f"  {event}" for event in core.events),
        "".join(traceback.format_exception(error)),
    )
    return "\n".join(lines)
