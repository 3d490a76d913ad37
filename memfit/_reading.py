"""Text out of files that the user names, which may be no files: a pipe would be waited for, a device read without end."""

from __future__ import annotations

import errno
from pathlib import Path

LARGEST = 1 << 30
"""Bytes that no plan, report or configuration has."""


def text_of(path: Path) -> str:
    """The text of a file. Raises OSError, also for what is no file or too large to be meant, and UnicodeDecodeError."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no file, but a device or a pipe")
    if path.is_file() and path.stat().st_size > LARGEST:
        raise OSError(errno.EFBIG, "it is larger than any that memfit reads")
    return path.read_text(encoding="utf-8")
