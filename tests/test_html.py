"""The report as a page: whole, self-contained, harmless whatever names are in it, and with every section there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import reports

from memfit.reporting.charts import charts
from memfit.reporting.html import block_bars, gauge
from memfit.reporting.lines import answers, comparison
from memfit.reporting.report import Report
from memfit.reporting.tables import tables

VOID = {"meta", "br", "img", "link", "input", "hr"}
SECTIONS = {
    "Memory over one step": "memory over one step by category, predicted and measured",
    "Memory by block": "per block kept and transient bytes",
    "The choice of micro-batch": "micro-batch against seconds and memory; rejected plans with reasons",
    "One step of each lever": "what one step of each lever more or less would cost",
    "What the run waits for": "loader against compute",
    "So far": "events",
    "Notes": "what to know about the numbers",
}


class Page(HTMLParser):
    """A page taken apart: its elements, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.headings: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in VOID:
            return
        self._open.append(tag)
        {"script": self.scripts, "style": self.styles, "h2": self.headings, "h3": self.headings}.get(tag, []).append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside in ("script", "style"):
            (self.scripts if inside == "script" else self.styles)[-1] += data
            return
        self.text += data
        if inside in ("h2", "h3"):
            self.headings[-1] += data
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data

    def with_tag(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def figures(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def full() -> Report:
    """With all that a page can show."""
    fields: dict[str, Any] = {
        "verification": reports.SAME,
        "draws": ("drop",),
        "events": [reports.event(n, "note", f"thing {n}") for n in range(3)],
        "stats": {"step": 30, "peak_measured": 300},
        "seconds": [1.0 + 0.1 * (n % 4) for n in range(30)],
        "waits": [0.2] * 30,
    }
    return reports.report(330, **fields)


REPORTS = {
    "full": full(),
    "hostile": reports.hostile(),
    "whole": reports.report(800),
    "ragged": reports.ragged(),
    "from a file": reports.report(plan=reports.planned(330), profile=None, prof=reports.profile()),
}
PAGES = {name: made.to_html() for name, made in REPORTS.items()}
ALL = pytest.mark.parametrize("name", REPORTS)


@ALL
def test_the_page_parses(name: str) -> None:
    page = Page(PAGES[name])
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [tag for tag, _ in page.elements].count("h1") == 1
    for attributes in page.with_tag("section"):
        assert "aria-label" in attributes or attributes["aria-labelledby"] in ids


@ALL
def test_the_page_is_self_contained(name: str) -> None:
    page = Page(PAGES[name])
    assert len(PAGES[name].encode()) <= 6 * 2**20
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert not {"src", "href", "srcset", "action", "data"} & set(attributes), (tag, attributes)
    assert not re.search(r"url\(|@import", "".join(page.styles))


@ALL
def test_the_pages_own_policy_forbids_requests(name: str) -> None:
    (policy,) = (m["content"] for m in Page(PAGES[name]).with_tag("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy and "unsafe-eval" not in policy and "script-src 'unsafe-inline'" not in policy


@ALL
def test_names_stay_names(name: str) -> None:
    page = Page(PAGES[name])
    assert len(page.scripts) == 3, "the figures, plotly, and what draws them"
    for tag, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")], (tag, attributes)
    assert "\x1b" not in PAGES[name]
    ours = PAGES[name].replace(page.scripts[1], "")
    assert reports.HOSTILE not in ours and "<img" not in ours


def test_hostile_names_are_shown_as_they_are() -> None:
    page = Page(PAGES["hostile"])
    shown = reports.HARMFUL.replace("\x1b", "\\x1b")
    assert page.text.count(shown) > 10
    assert shown in next(row for row in page.rows if row[:1] == ["precision"])[1]


def test_the_figures_hold_no_markup() -> None:
    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for entry in value.values() for text in strings(entry)]
        if isinstance(value, list):
            return [text for entry in value for text in strings(entry)]
        return [value] if isinstance(value, str) else []

    found = strings(Page(PAGES["hostile"]).figures)
    assert found
    assert not [text for text in found if "<script" in text or "<img" in text or "\x1b" in text]


def test_every_section_is_there() -> None:
    assert set(SECTIONS) <= set(Page(PAGES["full"]).headings)


def test_sections_without_anything_to_show_are_not() -> None:
    headings = Page(PAGES["from a file"]).headings
    assert "Memory over one step" not in headings and "What the run waits for" not in headings
    assert "Micro-batches by size of sample" in Page(PAGES["ragged"]).headings
    assert "Micro-batches by size of sample" not in Page(PAGES["full"]).headings


@ALL
def test_the_first_screen_has_every_row_and_answer(name: str) -> None:
    made, page = REPORTS[name], Page(PAGES[name])
    words = re.sub(r"\s+", " ", page.text)
    for row in comparison(made):
        for cell in (row.name, row.asked, row.here, row.remark):
            assert re.sub(r"\s+", " ", cell.replace("\x1b", "\\x1b")) in words
    for entry in answers(made):
        for line in entry.lines if entry.label != "memory holds" else ():
            assert re.sub(r"\s+", " ", line.replace("\x1b", "\\x1b")) in words


@ALL
def test_every_table_is_on_the_page_with_all_its_cells(name: str) -> None:
    page = Page(PAGES[name])
    rows = [[cell.strip() for cell in row] for row in page.rows]
    for table in tables(REPORTS[name]):
        if table.title == "Memory by block":
            continue  # drawn with bars between its columns
        for row in (table.columns, *table.rows):
            assert [cell.replace("\x1b", "\\x1b") for cell in row] in rows, table.title


@ALL
def test_every_chart_has_a_place_and_something_to_draw(name: str) -> None:
    page = Page(PAGES[name])
    places = {a["id"]: a for a in page.with_tag("div") if a.get("class") == "chart"}
    assert set(places) == set(page.figures) == set(charts(REPORTS[name]))
    for key, figure in page.figures.items():
        assert places[key]["aria-label"]
        assert figure["data"] and all(len(trace["x"]) == len(trace["y"]) > 0 for trace in figure["data"])


def test_the_memory_chart_stacks_to_the_curve() -> None:
    made = REPORTS["full"]
    figure = charts(made)["memory"].figure
    stacked = [sum(values) for values in zip(*(trace["y"] for trace in figure["data"]))]
    assert made.curve is not None
    assert stacked == list(made.curve.totals)
    texts = [note["text"] for note in figure["layout"]["annotations"]]
    assert "predicted peak 284 B" in texts and "measured peak 300 B" in texts and "budget 330 B" in texts


def test_every_option_is_a_point_and_the_plan_is_one_of_its_own_and_seconds_are_drawn_of_what_fits() -> None:
    made = REPORTS["full"]
    assert not all(option.fits for option in made.plan.options)
    for key in ("speed", "sizes"):
        traces = {trace["name"]: trace for trace in charts(made)[key].figure["data"]}
        drawn = [option for option in made.plan.options if option.fits or key == "sizes"]
        assert sum(len(trace["x"]) for trace in traces.values()) == len(drawn)
        assert ("does not fit" in traces) == (key == "sizes")
        assert traces["the plan"]["x"] == [made.plan.micro_batch]


def test_the_bars_of_waiting_and_computing_count_the_steps() -> None:
    computing, waiting = charts(REPORTS["full"])["pace"].figure["data"]
    assert computing["x"] == waiting["x"] == list(range(1, 31))


def test_the_gauge_adds_up() -> None:
    drawn = gauge(REPORTS["full"])
    assert drawn is not None
    assert sum(part.width for part in drawn.parts) == pytest.approx(100 * 284 / 330, abs=0.01)
    assert drawn.budget == 100 and drawn.measured == pytest.approx(100 * 300 / 330, abs=0.01)
    beyond = gauge(reports.report(330, stats={"step": 1, "peak_measured": 660}))
    assert beyond is not None and beyond.budget == 50 and beyond.measured == 100
    unknown = gauge(REPORTS["from a file"])
    assert unknown is not None and [part.name for part in unknown.parts] == ["training"]


def test_bars_are_as_long_as_their_numbers() -> None:
    made = REPORTS["whole"]
    widest = max(max(block.kept, block.transient) for block in made.blocks)
    for bar, block in zip(block_bars(made), made.blocks, strict=True):
        assert bar.kept_width == pytest.approx(100 * block.kept / widest, abs=0.01)
        assert bar.transient_width == pytest.approx(100 * block.transient / widest, abs=0.01)


@ALL
def test_a_notebook_gets_the_first_screen_without_scripts(name: str) -> None:
    made = REPORTS[name]
    page = Page(made._repr_html_())
    assert not page.scripts
    assert [row for row in page.rows if row[:1] == ["memory"]]
    assert "<img" not in made._repr_html_()
    assert len(made._repr_html_()) < 50_000


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


IN_A_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no browser here")


def opened(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The page as a browser makes it (stdout), and what its console says (stderr)."""
    always = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=8000"]
    command = [str(CHROMIUM), *always, *flags, f"--user-data-dir={page.parent}/profile", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.slow
@IN_A_BROWSER
@pytest.mark.parametrize("name", ["full", "hostile"])
def test_a_browser_draws_it_without_a_complaint(name: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(PAGES[name], encoding="utf-8")
    ran = opened(tmp_path / "report.html")
    assert not re.findall(r".*CONSOLE.*", ran.stderr)
    for key in charts(REPORTS[name]):
        place = re.search(rf'<div id="{key}".*?</svg>', ran.stdout, re.DOTALL)
        assert place is not None and "main-svg" in place[0], key


MEASURE = """<iframe id="page" src="report.html" width="{width}" height="900"></iframe><p id="widest"></p><script>
document.getElementById("page").onload = () => setTimeout(() => {{
  const root = document.getElementById("page").contentDocument.documentElement;
  document.getElementById("widest").textContent = root.clientWidth + " " + root.scrollWidth;
}}, 2000);
</script>"""


@pytest.mark.slow
@IN_A_BROWSER
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["full", "hostile", "ragged"])
def test_the_page_is_never_wider_than_its_window(name: str, width: int, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(PAGES[name], encoding="utf-8")
    (tmp_path / "window.html").write_text(MEASURE.format(width=width), encoding="utf-8")
    ran = opened(tmp_path / "window.html", "--allow-file-access-from-files")
    found = re.search(r'id="widest">(\d+) (\d+)<', ran.stdout)
    assert found is not None, "the page did not load"
    seen, needed = map(int, found.groups())
    assert width - 20 <= seen <= width
    assert needed <= seen
