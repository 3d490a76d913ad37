"""Runs a script with a pause after every step, so that there is time to kill it: slowed.py SECONDS SCRIPT."""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

import memfit

if __name__ == "__main__":
    seconds, path = float(sys.argv[1]), sys.argv[2]
    plain = memfit.Run.step

    def step(run: Any, batch: Any) -> Any:
        time.sleep(seconds)
        return plain(run, batch)

    memfit.Run.step = step  # type: ignore[method-assign]
    runpy.run_path(path, run_name="__main__")
