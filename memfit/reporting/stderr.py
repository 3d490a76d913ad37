"""Prints messages on stderr while a script trains, because people parse what their scripts print on stdout.

A script without a stderr (closed, as daemons do, or None, without a console) trains without messages.
"""

from __future__ import annotations

import io
import sys
from typing import TextIO


def stderr() -> TextIO:
    """Return the stream for messages; without a stderr, one that discards them."""
    there = sys.stderr
    return io.StringIO() if there is None or there.closed else there


def tell(line: str) -> None:
    """Print one line on stderr. A failing write (a pipe whose reader is gone) does not end the training."""
    try:
        print(f"memfit: {line}", file=stderr())
    except OSError:
        pass
