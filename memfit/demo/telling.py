"""Prints the demo's lines on stdout: a label and a text."""

from __future__ import annotations

import sys

WIDTH = 16
"""Width of the label column, in characters."""


def tell(label: str, text: str) -> None:
    """Print a labelled line."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and sys.platform != "win32" else ("", "")
    print(f"{bold}{label:<{WIDTH}}{plain}{text}", flush=True)


def more(text: str) -> None:
    """Print another line under the same label."""
    print(f"{'':<{WIDTH}}{text}", flush=True)
