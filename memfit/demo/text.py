"""A dataset of bytes: the source text of this Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from memfit._errors import UsageError

PLENTY = 12 << 20
"""Size of the text in bytes at which no more files are read."""
_NOT_ITS_OWN = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3")


class LibraryText(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of `length` bytes, each with the sequence shifted by one byte as its target."""

    def __init__(self, length: int, root: Path | None = None) -> None:
        self._length = length
        self._text = torch.frombuffer(bytearray(library_text(root)), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        piece = self._text[start : start + self._length + 1].long()
        return piece[:-1], piece[1:]


def library_text(root: Path | None = None) -> bytes:
    """Return the library's concatenated modules. Raises UsageError where only compiled modules are installed."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]
    text = bytearray()
    for file in files:
        if file.parent.name not in _NOT_ITS_OWN and len(text) < PLENTY:
            text += file.read_bytes()
    if len(text) < 1 << 16:
        raise UsageError(
            "the source text of Python's standard library",
            found=f"there are {len(text):,} bytes of it in {root}",
            next_move="run the demo with a Python that has its library as .py files",
        )
    return bytes(text)
