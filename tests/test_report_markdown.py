"""The report as Markdown: tables with equal columns, and names that stay names."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import reports

from memfit.reporting.markdown import escaped
from memfit.reporting.tables import tables

REPORTS = {
    "accumulates": reports.report(330, verification=reports.SAME, draws=("drop",)),
    "whole": reports.report(800),
    "ragged": reports.ragged(),
    "hostile": reports.hostile(),
    "from a file": reports.report(plan=reports.planned(330), profile=None, prof=reports.profile()),
}
ALL = pytest.mark.parametrize("name", REPORTS)


def cells(line: str) -> list[str]:
    """The cells of a table's row: pipes that are escaped separate nothing."""
    return re.split(r"(?<!\\)\|", line)[1:-1]


def blocks(text: str) -> list[list[str]]:
    """The tables, as their lines."""
    found: list[list[str]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            found += [] if before.startswith("|") else [[]]
            found[-1].append(line)
        before = line
    return found


@ALL
def test_every_table_has_equal_columns_under_a_rule(name: str) -> None:
    text = REPORTS[name].to_markdown()
    found = blocks(text)
    assert len(found) == 1 + len(tables(REPORTS[name]))
    for table in found:
        assert len({len(cells(line)) for line in table}) == 1
        assert all(re.fullmatch(r" -{3,}:? ", cell) for cell in cells(table[1]))
        assert len(table) > 2


@ALL
def test_every_table_stands_alone(name: str) -> None:
    """A table needs an empty line before it, or it is taken for a paragraph."""
    lines = REPORTS[name].to_markdown().splitlines()
    for before, line in pairwise(lines):
        if line.startswith("|") and not before.startswith("|"):
            assert before == ""


@ALL
def test_no_name_becomes_markup(name: str) -> None:
    text = REPORTS[name].to_markdown().replace("<br>", "")
    assert "<" not in text and ">" not in text
    assert "\x1b" not in text
    assert not re.search(r"(?<!\\)\]\(", text), "a link"
    assert not re.search(r"(?<!\\)`", text), "code"


def test_a_hostile_name_reads_as_it_was() -> None:
    plain = re.sub(r"\\([\\`*_{}\[\]()#|~])", r"\1", escaped(reports.HARMFUL))
    plain = plain.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert plain == reports.HARMFUL.replace("\x1b", "\\x1b")


def test_lines_cannot_be_broken_by_a_name() -> None:
    made = reports.report(330, events=[reports.event(1, "note", "one\n\n# two\r| three")])
    assert "one\\\\n\\\\n\\# two\\\\r\\| three" in made.to_markdown()


def test_numbers_are_aligned_to_the_right() -> None:
    rules = {cells(table[0])[0].strip(): table[1] for table in blocks(REPORTS["accumulates"].to_markdown())}
    assert rules["block"].startswith("| --- | ---: | ---: |")
    assert rules["phase"].startswith("| --- | ---: |")


def test_it_opens_with_the_verdict() -> None:
    text = REPORTS["accumulates"].to_markdown()
    assert text.startswith("# memfit: Net, 25 parameters, SGD, on a machine \\(mps\\)\n\n**fits**: 284 B expected")
    assert text.endswith("*\n")
