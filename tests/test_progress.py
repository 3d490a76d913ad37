"""Progress of long work: a bar on a terminal that goes away, a line now and then elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from memfit.reporting.progress import EVERY, Progress, progress


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(work: Callable[[Progress, Clock], None], total: int | None = 10) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with progress("planning", total, to=stream, clock=clock) as bar:
        work(bar, clock)
    return stream.getvalue().splitlines()


def on_a_terminal(work: Callable[[Progress], None], total: int | None = 4, label: str = "planning") -> str:
    """What a terminal receives."""
    leader, follower = pty.openpty()
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(all_of(leader)))
    reader.start()
    with open(follower, "w", encoding="utf-8") as stream:
        assert stream.isatty()
        with progress(label, total, to=stream) as bar:
            work(bar)
    reader.join()
    os.close(leader)
    return b"".join(received).decode()


def all_of(leader: int) -> Iterator[bytes]:
    """What is written to a pseudo terminal until its other end is closed, which Linux tells by an error."""
    try:
        while data := os.read(leader, 1 << 16):
            yield data
    except OSError:
        return


def test_elsewhere_there_are_plain_lines_and_few_of_them() -> None:
    def work(bar: Progress, clock: Clock) -> None:
        for n in range(10):
            clock.now = n * EVERY / 4
            bar.advance()

    assert lines_of(work) == ["memfit: planning  1/10", "memfit: planning  5/10", "memfit: planning  9/10"]


def test_a_line_says_what_is_being_done() -> None:
    def work(bar: Progress, clock: Clock) -> None:
        bar.say("tracing")
        clock.now = EVERY
        bar.say("timing 4 samples\x1b[2J\nat once")

    assert lines_of(work, None) == ["memfit: planning  tracing", "memfit: planning  timing 4 samples\\x1b[2J\\nat once"]


def test_work_of_unknown_length_is_counted() -> None:
    assert lines_of(lambda bar, clock: bar.advance(3), None) == ["memfit: planning  3"]


def test_quick_work_that_says_nothing_prints_nothing() -> None:
    assert lines_of(lambda bar, clock: None) == []


def test_by_default_it_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("planning", 2) as bar:
        bar.advance()
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "memfit: planning  1/2\n"


def test_an_exception_goes_through_and_what_was_said_stays() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError), progress("planning", 2, to=stream) as bar:
        bar.advance()
        raise KeyError("the user's own")
    assert stream.getvalue() == "memfit: planning  1/2\n"


def test_a_terminal_sees_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")

    def work(bar: Progress) -> None:
        for _ in range(4):
            bar.say("timing")
            bar.advance()

    text = on_a_terminal(work)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "memfit: planning" in shown and "4/4" in shown and "timing" in shown and "━" in shown
    assert "\x1b[2K" in text, "the bar's line is erased at the end"
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K"))


def test_names_reach_a_terminal_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    text = on_a_terminal(lambda bar: bar.say("said\x1b[2J[bold]x[/bold]"), label="lab\x1b[5m[red]el")
    assert "\x1b[2J" not in text and "\x1b[5m" not in text
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "lab\\x1b[5m[red]el" in shown and "said\\x1b[2J[bold]x[/bold]" in shown
