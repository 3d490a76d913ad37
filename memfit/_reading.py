"""Reads text files that the user names. Rejects pipes, which would block, and devices, which may never end."""

from __future__ import annotations

import errno
from pathlib import Path

LARGEST = 1 << 30
"""Size limit in bytes. No plan, report or configuration is that large."""


def text_of(path: Path) -> str:
    """Return the text of a file. Raises OSError, also for a pipe, a device or a file over `LARGEST`, and UnicodeDecodeError."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no file, but a device or a pipe")
    if path.is_file() and path.stat().st_size > LARGEST:
        raise OSError(errno.EFBIG, "it is larger than any file memfit reads")
    return path.read_text(encoding="utf-8")
