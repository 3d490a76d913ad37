"""Shows the progress of a long computation: a bar on a terminal, occasional lines elsewhere. Always on stderr.

Not covered: several computations at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from memfit.reporting.stderr import stderr
from memfit.reporting.words import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress, TaskID

EVERY = 3.0
"""Minimum seconds between two lines without a terminal."""


class Progress(Protocol):
    """How a computation reports its progress."""

    def advance(self, n: int = 1) -> None:
        """Count `n` more items as done."""
        ...

    def say(self, text: str) -> None:
        """Show what is being done now."""
        ...


@contextmanager
def progress(
    label: str, total: int | None, *, to: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Progress]:
    """Show the progress of a computation while the context lasts. `total`: the number of items, None if not known.

    On a terminal, `to` (default: stderr) shows a bar that disappears at the end. Elsewhere a line appears at most every
    few seconds, so that logs stay short.
    """
    stream = stderr() if to is None else to
    if not stream.isatty():
        yield _Lines(printable(label), total, stream, clock)
        return
    bar = _rich(stream, counted=total is not None)
    with bar:
        yield _Bar(bar, bar.add_task(printable(label), total=total, said=""))


class _Lines:
    """Progress as plain lines, at least `EVERY` seconds apart."""

    def __init__(self, label: str, total: int | None, to: TextIO, clock: Callable[[], float]) -> None:
        self._label, self._total, self._to, self._clock = label, total, to, clock
        self._done, self._said = 0, ""
        self._next = clock()

    def advance(self, n: int = 1) -> None:
        self._done += n
        self._print()

    def say(self, text: str) -> None:
        self._said = printable(text)
        self._print()

    def _print(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + EVERY
        of = f"{self._done}/{self._total}" if self._total is not None else str(self._done) if self._done else ""
        with suppress(OSError):  # a pipe whose reader is gone
            print("  ".join(part for part in (f"memfit: {self._label}", of, self._said) if part), file=self._to, flush=True)


class _Bar:
    """A bar drawn by rich."""

    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def advance(self, n: int = 1) -> None:
        self._bar.advance(self._task, n)

    def say(self, text: str) -> None:
        self._bar.update(self._task, said=printable(text))


def _rich(stream: TextIO, *, counted: bool) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn, TimeElapsedColumn

    return RichProgress(
        TextColumn("memfit: {task.description}", markup=False),
        BarColumn(bar_width=30),
        *([MofNCompleteColumn()] if counted else []),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", markup=False, style="dim"),
        console=Console(file=stream),
        redirect_stdout=_is_terminal(sys.stdout),  # stdout into a file or a pipe stays there
        transient=True,
    )


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
