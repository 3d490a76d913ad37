"""A command in whose processes the device is there from the beginning."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "SIMCUDA"
"""The environment variable that says how to install it, as JSON: arguments of `install`."""
SITE = Path(__file__).resolve().parent / "site"


def environment(base: Mapping[str, str] = os.environ, **settings: Any) -> dict[str, str]:
    """An environment for commands: Python begins with the device there, as `install(**settings)` makes it."""
    paths = os.pathsep.join(filter(None, (str(SITE), base.get("PYTHONPATH", ""))))
    return {**base, VARIABLE: json.dumps(settings), "PYTHONPATH": paths}


def settings_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `environment` wrote down."""
    return json.loads(environ[VARIABLE])
