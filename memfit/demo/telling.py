"""The demo's lines on stdout: a label, and what there is to say."""

from __future__ import annotations

import sys

WIDTH = 16
"""Columns of a label."""


def tell(label: str, text: str) -> None:
    """A labelled line."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and sys.platform != "win32" else ("", "")
    print(f"{bold}{label:<{WIDTH}}{plain}{text}", flush=True)


def more(text: str) -> None:
    """Another line under the same label."""
    print(f"{'':<{WIDTH}}{text}", flush=True)
