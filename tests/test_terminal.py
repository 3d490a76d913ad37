"""The report on a terminal: never wider than it, nothing that a terminal would obey."""

from __future__ import annotations

import pytest
import reports

from memfit.reporting.lines import comparison, headline
from memfit.reporting.terminal import plain, show

WIDTHS = (40, 60, 80, 120)
REPORTS = {
    "accumulates": reports.report(330, verification=reports.SAME, draws=("drop",)),
    "whole": reports.report(800),
    "ragged": reports.ragged(),
    "hostile": reports.hostile(),
    "from a file": reports.report(plan=reports.planned(330), profile=None, prof=reports.profile()),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_no_line_of_a_report_is_wider_than_the_terminal(name: str, width: int) -> None:
    lines = plain(REPORTS[name], width).splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_cut_off(name: str) -> None:
    """Every word of the comparison is there, whatever the width, once line breaks are taken out."""
    whole = "".join(plain(REPORTS[name], 200).split())
    for row in comparison(REPORTS[name]):
        assert "".join(row.name.split()) in whole
    assert "…" not in plain(REPORTS[name], 60)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_reaches_the_terminal_as_an_order(width: int) -> None:
    text = plain(REPORTS["hostile"], width)
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b[31m[red]" in "".join(text.split())


def test_markup_of_rich_is_shown_as_it_is() -> None:
    made = reports.report(330, events=[reports.event(1, "note", "[bold]not bold[/bold] :smile:")])
    assert "[bold]not bold[/bold] :smile:" in plain(made, 120)


def test_our_own_words_are_ascii() -> None:
    for name in ("accumulates", "whole", "ragged", "from a file"):
        assert plain(REPORTS[name], 120).isascii()


def test_the_first_screen_is_in_order() -> None:
    text = plain(REPORTS["accumulates"], 120)
    order = [headline(REPORTS["accumulates"]), "fits", "as the script asked", "batch", "memory", "per step", "same training"]
    order += ["not kept equal", "it costs", "memory holds", "next", "not taken"]
    found = [text.index(word) for word in order]
    assert found == sorted(found)


def test_it_fits_the_screen() -> None:
    assert len(plain(REPORTS["accumulates"], 120).splitlines()) <= 40


def test_numbers_in_columns_end_in_one_column() -> None:
    """The plans that were not taken: "at most" and "per step" are aligned to the right."""
    lines = plain(REPORTS["accumulates"], 120).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("not taken"))
    ends = {line.index(" B ") for line in lines[start:] if " B " in line}
    assert len(ends) == 1


def test_the_plans_considered_are_told_by_the_same_kinds_of_numbers_as_the_plan() -> None:
    """Expected and at most, each under its heading, for the plan and for what was not taken."""
    made = REPORTS["accumulates"]
    lines = plain(made, 120).splitlines()
    taken = next(line for line in lines if line.startswith("taken"))
    own = next(option for option in made.plan.options if not option.reason)
    heading = next(line for line in lines if "at most" in line and "expected" in line and "per step" in line)
    for name, size in (("expected", own.cost.peak), ("at most", own.cost.upper)):
        assert taken[: heading.index(name) + len(name)].endswith(f" {size} B")


def test_what_to_know_about_the_numbers_is_said_on_a_terminal_too() -> None:
    made = reports.report(330, prof=reports.profile(notes=("the machine was busy",)))
    assert "the machine was busy" in plain(made, 120) and "the machine was busy" in str(made.plan)


def test_str_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert str(REPORTS["accumulates"]) == plain(REPORTS["accumulates"], 70)


def test_show_prints_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    show(REPORTS["accumulates"])
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = [line.rstrip() for line in printed.out.splitlines()]
    assert lines == plain(REPORTS["accumulates"], 100).splitlines()
