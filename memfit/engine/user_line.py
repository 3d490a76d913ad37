"""Finds the running line of the user's code: outside memfit, torch and other installed packages."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType


def line_of_script() -> str:
    """Returns the user's innermost running line, as "train.py:48 (loss = margin(out))", or "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_of_script(name) and not name.startswith("<"):
            code = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).name}:{frame.f_lineno}" + (f" ({code[:60]})" if code else "")
        frame = frame.f_back
    return ""


@cache
def is_of_script(file: str) -> bool:
    """Return whether code of this file is the user's. A file in "<" and ">" is code that was made at run time."""
    return not file.startswith(("<frozen", *_others()))


@cache
def _others() -> tuple[str, ...]:
    """Return the folders that hold no user code."""
    paths = sysconfig.get_paths()
    return str(Path(__file__).parents[1]), *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
