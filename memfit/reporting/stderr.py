"""What memfit says while a script trains: lines on stderr, as people parse what their scripts print on stdout.

A script without a stderr (closed, as daemons do, or None, as where there is no console) trains all the same, unheard.
"""

from __future__ import annotations

import io
import sys
from typing import TextIO


def stderr() -> TextIO:
    """The stream to say things on; what is written goes nowhere where there is none."""
    there = sys.stderr
    return io.StringIO() if there is None or there.closed else there


def tell(line: str) -> None:
    """Say a line. Where nothing can be written any more (a pipe whose reader left), that is no reason to end a training."""
    try:
        print(f"memfit: {line}", file=stderr())
    except OSError:
        pass
