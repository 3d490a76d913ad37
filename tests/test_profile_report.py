"""A profile as a page, as JSON and as Markdown: whole, self-contained, harmless, and with the same numbers in each."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import handmade
import pytest
import reports
from test_html import IN_A_BROWSER, MEASURE, Page, opened
from test_module_tree import profile_of

from memfit._errors import UsageError
from memfit.profiling.profile import ModuleFacts, Profile
from memfit.reporting.profile_json import FIELDS, VERSION
from memfit.reporting.profiled import ProfileReport, profile_report
from memfit.reporting.words import printable

MOST = 6 << 20
"""Bytes of a page at most."""


def hostile() -> Profile:
    """Every name is out to be markup."""
    prof = reports.profile()
    timeline = prof.timeline
    assert timeline is not None
    owners = tuple(f"{owner}{reports.HARMFUL}" if owner else "" for owner in timeline.owners)
    numbers = [0] * len(timeline.fixed)
    return replace(
        prof,
        model=replace(prof.model, name=reports.HARMFUL, optimizer=reports.HARMFUL),
        timeline=replace(timeline, owners=owners, operation=_array(numbers), operation_names=(reports.HARMFUL,)),
        notes=(reports.HARMFUL,),
        modules=tuple(ModuleFacts(name, reports.HARMFUL, 5, 5) for name in owners),
        precision=reports.HARMFUL,
    )


def _array(numbers: list[int]) -> Any:
    import numpy as np

    return np.array(numbers, dtype=np.int32)


REPORTS = {
    "cpu": profile_report(profile_of("gpt"), 32),
    "card": profile_report(profile_of("hf_gpt2", "a100-40gb"), 32),
    "hostile": profile_report(hostile(), 10),
    "measured": profile_report(handmade.profile(None, points=((1, 100), (2, 200)), source="measured"), 4),
}
PAGES = {name: report.to_html() for name, report in REPORTS.items()}
ALL = pytest.mark.parametrize("name", REPORTS)
TRACED = pytest.mark.parametrize("name", ["cpu", "card", "hostile"])


# ---- the page


@ALL
def test_the_page_parses_and_needs_no_network(name: str) -> None:
    page = Page(PAGES[name])
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert len(PAGES[name].encode()) <= MOST
    assert not [a for _, a in page.elements if "src" in a or "href" in a]
    policy = next(a["content"] for a in page.with_tag("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe-eval" not in policy


@ALL
def test_names_stay_names(name: str) -> None:
    page = Page(PAGES[name])
    assert len(page.scripts) == 3
    for tag, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")], (tag, attributes)
    ours = PAGES[name].replace(page.scripts[1], "")
    assert reports.HOSTILE not in ours and "<img" not in ours and "\x1b" not in ours


@TRACED
def test_the_chart_stacks_to_the_curve_and_marks_the_peak(name: str) -> None:
    report = REPORTS[name]
    figure = Page(PAGES[name]).figures["memory"]
    assert report.curve is not None and report.explanation.moment is not None
    totals, events = report.curve.totals, figure["data"][0]["x"]
    stacked = [sum(values) for values in zip(*(trace["y"] for trace in figure["data"]))]
    unit = max(totals) / max(stacked)
    assert stacked == pytest.approx([total / unit for total in totals], rel=1e-4)
    notes = figure["layout"]["annotations"]
    mark = next(note for note in notes if note.get("showarrow"))
    assert totals[events.index(mark["x"])] == max(totals) == report.explanation.tensors
    if name != "hostile":
        assert mark["text"] == report.explanation.moment.operation
    assert {"forward 1", "backward 2", "optimizer"} <= {note["text"] for note in notes} or name == "hostile"


@TRACED
def test_every_module_is_on_the_page_and_unfolds(name: str) -> None:
    report, page = REPORTS[name], Page(PAGES[name])
    entries = [entry for _, entry in report.tree.root.flat()]
    inside = sum(1 for entry in entries if entry.children) + _folded(report)
    assert len(page.with_tag("details")) == len(page.with_tag("summary")) == inside
    assert page.with_tag("details")[0].keys() == {"open"}
    for entry in entries:
        assert printable(entry.name) in page.text


def _folded(report: ProfileReport) -> int:
    """Rows of several alike without anything inside unfold to the row of one of them; with something, both unfold."""
    return sum(1 for level, entry, per in _with_per(report.tree.root, 1) if entry.alike > per)


def _with_per(entry: Any, per: int, level: int = 0) -> Any:
    yield level, entry, per
    for child in entry.children:
        yield from _with_per(child, entry.alike, level + 1)


@TRACED
def test_tables_hold_what_the_explanation_says(name: str) -> None:
    report, page = REPORTS[name], Page(PAGES[name])
    rows = [[cell.strip() for cell in row] for row in page.rows]
    assert len(rows) == 2 + len(report.explanation.modules) + len(report.explanation.largest)


def test_what_cannot_be_told_is_said() -> None:
    page = Page(PAGES["measured"])
    assert not page.figures and "unknown" in page.text and not page.rows
    assert "unknown" in str(REPORTS["measured"]) and "unknown" in REPORTS["measured"].to_markdown()


# ---- JSON


@ALL
def test_the_json_holds_the_whole_timeline(name: str) -> None:
    report = REPORTS[name]
    data = json.loads(report.to_json())
    assert (data["profile"], data["version"], data["samples"]) == ("memfit", VERSION, report.samples)
    assert set(FIELDS) <= set(data)
    timeline = report.profile.timeline
    assert len(data["allocations"]) == (0 if timeline is None else len(timeline.fixed))
    if timeline is None:
        return
    size = [entry["fixed"] + entry["per_sample"] * report.samples for entry in data["allocations"]]
    event = data["explanation"]["moment"]["event"]
    alive = [
        bytes_ for bytes_, entry in zip(size, data["allocations"]) if entry["born"] <= event and not 0 <= entry["died"] <= event
    ]
    assert sum(alive) == data["explanation"]["tensors"] == timeline.peak(report.samples)
    assert data["tree"]["root"]["kept"] == report.tree.root.kept
    assert all(entry["phase"] in {p["name"] for p in data["phases"]} for entry in data["allocations"])


def test_the_json_can_be_read_by_people() -> None:
    lines = REPORTS["cpu"].to_json().splitlines()
    allocations = [line for line in lines if line.startswith('  {"fixed"')]
    operations = [line for line in lines if line.startswith('  {"operation"')]
    timeline = REPORTS["cpu"].profile.timeline
    assert timeline is not None and timeline.operations is not None
    assert len(allocations) == len(timeline.fixed) and len(operations) == len(timeline.operations.event)
    assert max(map(len, lines)) < 1500


# ---- Markdown, text, files


@ALL
def test_markdown_and_text_are_harmless(name: str) -> None:
    text, markdown = str(REPORTS[name]), REPORTS[name].to_markdown()
    assert "\x1b" not in text and "\x1b" not in markdown
    assert "<script" not in markdown and "<img" not in markdown
    assert f"micro-batches of {REPORTS[name].samples}" in text and markdown.startswith("# memfit: ")


def test_a_terminal_gets_the_same_numbers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report = REPORTS["card"]
    for columns in ("160", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        report.print()
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= int(columns)
        assert "h.0 to h.1" in re.sub(r"\s+", " ", shown) and "each of 2" in shown
    assert "on NVIDIA A100" in report.to_markdown()


def test_saving(tmp_path: Path) -> None:
    report = REPORTS["cpu"]
    for suffix in ("html", "json", "md"):
        report.save(tmp_path / f"out.{suffix}")
        assert (tmp_path / f"out.{suffix}").stat().st_size > 1000
    with pytest.raises(UsageError, match="names no format"):
        report.save(tmp_path / "out.txt")


# ---- in a browser


@pytest.mark.slow
@IN_A_BROWSER
@pytest.mark.parametrize("name", ["card", "hostile", "measured"])
def test_a_browser_draws_it_without_a_complaint(name: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(PAGES[name], encoding="utf-8")
    ran = opened(tmp_path / "report.html")
    assert not re.findall(r".*CONSOLE.*", ran.stderr)
    place = re.search(r'<div id="memory".*?</svg>', ran.stdout, re.DOTALL)
    assert (place is not None and "main-svg" in place[0]) == (name != "measured")


@pytest.mark.slow
@IN_A_BROWSER
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["card", "hostile"])
def test_the_page_is_never_wider_than_its_window(name: str, width: int, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(PAGES[name].replace("<details>", "<details open>"), encoding="utf-8")
    (tmp_path / "window.html").write_text(MEASURE.format(width=width), encoding="utf-8")
    ran = opened(tmp_path / "window.html", "--allow-file-access-from-files")
    found = re.search(r'id="widest">(\d+) (\d+)<', ran.stdout)
    assert found is not None, "the page did not load"
    seen, needed = map(int, found.groups())
    assert width - 20 <= seen <= width
    assert needed <= seen
