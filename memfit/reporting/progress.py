"""How far a long computation is: a bar on a terminal, now and then a line elsewhere. Always on stderr.

Not covered: several at once.
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
"""Seconds between two lines where there is no terminal."""


class Progress(Protocol):
    """What a computation says of itself."""

    def advance(self, n: int = 1) -> None:
        """`n` more are done."""
        ...

    def say(self, text: str) -> None:
        """What is being done now."""
        ...


@contextmanager
def progress(
    label: str, total: int | None, *, to: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Progress]:
    """Show how far it is while the context lasts. `total` None: it is not known how much there is to do.

    On a terminal `to` (default: stderr) shows a bar that goes away at the end; elsewhere a line appears at most every
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
    """Plain lines, few of them."""

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
        with suppress(OSError):  # a pipe whose reader left
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
        redirect_stdout=_is_terminal(sys.stdout),  # what goes into a file or a pipe stays there
        transient=True,
    )


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
