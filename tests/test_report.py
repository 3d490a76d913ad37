"""The report as a value: it goes to files and back unchanged, refuses what is no report, and its numbers add up."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import handmade
import pytest
import reports
from helpers import cross_entropy, mlp, points, wrapped

from memfit import MemfitError
from memfit._errors import PlanFileError, UsageError
from memfit.planning.plan import Plan
from memfit.reporting import report as reporting
from memfit.reporting.lines import peak_holds
from memfit.reporting.memory import block_costs, curve_of
from memfit.reporting.report import Report

ROOMS = {"smaller micro-batches": 330, "blocks checkpointed": 400, "whole": 800}


def everything() -> dict[str, Report]:
    """Reports of all kinds, by name."""
    found = {name: reports.report(room) for name, room in ROOMS.items()}
    found |= {"hostile": reports.hostile(), "ragged": reports.ragged(), "from a file": from_a_file()}
    return found


def from_a_file() -> Report:
    """Of a run whose plan came from a file: nothing was profiled."""
    return reports.report(plan=reports.planned(330), profile=None, prof=reports.profile())


ALL = pytest.mark.parametrize("name", everything())


# ---- to files and back


@ALL
def test_json_restores_an_equal_report(name: str, tmp_path: Path) -> None:
    made = everything()[name]
    made.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == made


def test_numbers_that_json_does_not_have_come_back() -> None:
    verification = dataclasses.replace(reports.SAME, relative_error=math.inf, worst_error=-math.inf)
    made = reports.report(verification=verification)
    json.loads(made.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert Report.from_json(made.to_json()) == made


def test_a_lone_surrogate_in_a_name_can_be_saved(tmp_path: Path) -> None:
    made = reports.report(events=[reports.event(1, "note", "file \udcff.bin")])
    for suffix in (".json", ".md", ".html"):
        made.save(tmp_path / f"report{suffix}")
        (tmp_path / f"report{suffix}").read_text(encoding="utf-8")


@pytest.mark.parametrize("suffix", [".html", ".json", ".md", ".HTML"])
def test_the_suffix_names_the_format(suffix: str, tmp_path: Path) -> None:
    made = reports.report()
    texts = {".html": made.to_html, ".json": made.to_json, ".md": made.to_markdown}
    made.save(str(tmp_path / f"report{suffix}"))
    assert (tmp_path / f"report{suffix}").read_text(encoding="utf-8") == texts[suffix.lower()]()
    assert [path.name for path in tmp_path.iterdir()] == [f"report{suffix}"]


def in_three_parts(error: MemfitError, number: str) -> None:
    """The error names what was asked, what was found and what to do, and the reader's own words."""
    assert error.asked and error.found and error.next_move
    assert number in str(error)


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz"])
def test_an_unknown_suffix_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        reports.report().save(tmp_path / name)
    in_three_parts(caught.value, name)
    assert not list(tmp_path.iterdir())


def unwritable(tmp_path: Path) -> dict[str, Path]:
    """Paths that no report can be written to, as root or not."""
    (tmp_path / "file").write_text("")
    (tmp_path / "directory.html").mkdir()
    return {
        "the directory is missing": tmp_path / "missing" / "report.html",
        "its directory is a file": tmp_path / "file" / "report.html",
        "it is a directory": tmp_path / "directory.html",
        "the name is too long": tmp_path / f"{'x' * 300}.html",
    }


@pytest.mark.parametrize(
    "why", ["the directory is missing", "its directory is a file", "it is a directory", "the name is too long"]
)
def test_a_path_that_cannot_be_written_is_refused_and_nothing_is_left_behind(why: str, tmp_path: Path) -> None:
    path = unwritable(tmp_path)[why]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError) as caught:
        reports.report().save(path)
    in_three_parts(caught.value, path.name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a file system that is read-only for everybody")
def test_a_read_only_directory_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        reports.report().save("/proc/report.json")
    in_three_parts(caught.value, "/proc/report.json")


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("kept")
    broken = dataclasses.replace(reports.report(), made=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


# ---- what is no report


def data() -> dict[str, Any]:
    return json.loads(reports.hostile().to_json())


DAMAGED = {
    "empty": "",
    "not JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "a number": "3",
    "another program's": '{"version": 1}',
    "a plan": handmade.plan().to_json(),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_no_report_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(DAMAGED[what])
    with pytest.raises(UsageError) as caught:
        Report.load(path)
    in_three_parts(caught.value, str(path))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path / "report.json", tmp_path):
        with pytest.raises(UsageError) as caught:
            Report.load(path)
        in_three_parts(caught.value, str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.json")
    for load, kind in ((Report.load, UsageError), (Plan.load, PlanFileError)):
        with pytest.raises(kind) as caught:
            load(tmp_path / "report.json")
        in_three_parts(caught.value, "it is no file")


def test_a_later_version_is_refused_by_its_number() -> None:
    later = data() | {"version": reporting.VERSION + 6}
    with pytest.raises(UsageError, match=r"version 7.*versions up to 1"):
        Report.from_json(json.dumps(later))


FIELDS = [field.name for field in dataclasses.fields(Report)]

LATER = ["change", "every"]
"""Fields that files of earlier versions do not have."""


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in LATER])
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    damaged = data()
    del damaged[field]
    with pytest.raises(UsageError, match=f"{field!r}"):
        Report.from_json(json.dumps(damaged))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_is_refused(field: str) -> None:
    with pytest.raises((UsageError, PlanFileError)) as caught:
        Report.from_json(json.dumps(data() | {field: {"no": "such thing"}}))
    in_three_parts(caught.value, "")


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'colour'"):
        Report.from_json(json.dumps(data() | {"colour": "red"}))


def test_a_damaged_value_deep_inside_is_refused_with_its_place() -> None:
    damaged = data()
    damaged["curve"]["moments"][1]["holds"][0][1] = "many"
    with pytest.raises(UsageError, match=r"report\.curve\.moments\[1\]\.holds\[0\]\[1\]"):
        Report.from_json(json.dumps(damaged))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300, 10**400, "inf"], ids=lambda number: str(number)[:6])
@pytest.mark.parametrize("place", ["pace.peak", "pace.samples_per_second", "pace.seconds.0", "drift", "blocks.0.recompute"])
def test_a_number_that_cannot_be_meant_is_refused_with_its_place(place: str, number: Any) -> None:
    damaged = data()
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    around: Any = damaged
    for part in way:
        around = around[part]
    around[last] = number
    with pytest.raises(UsageError) as raised:
        Report.from_json(json.dumps(damaged))
    in_three_parts(raised.value, f"report.{way[0] if way else last}")


def test_a_curve_whose_layers_differ_in_length_is_refused() -> None:
    damaged = data()
    damaged["curve"]["layers"][0][1].pop()
    with pytest.raises(UsageError, match="layers"):
        Report.from_json(json.dumps(damaged))


def test_a_damaged_plan_inside_is_refused_as_a_plan() -> None:
    damaged = data()
    damaged["plan"]["micro_batch"] = 0
    with pytest.raises(PlanFileError, match="micro_batch"):
        Report.from_json(json.dumps(damaged))


# ---- the numbers add up


def test_the_curve_is_what_pencil_and_paper_say() -> None:
    """4 samples: weights 100, input 4, blocks 44 each, loss 16 (see handmade.two_blocks)."""
    curve = curve_of(handmade.two_blocks(), 4, accumulates=True)
    by_phase = {(moment.phase, moment.micro_batch): moment.total for moment in curve.moments}
    assert by_phase[("input", 1)] == 100 + 4
    assert by_phase[("forward", 1)] == 100 + 4 + 2 * 44 + 16
    assert by_phase[("forward", 2)] == 100 + 100 + 4 + 2 * 44 + 16
    assert curve.peak.phase == "forward" and curve.peak.micro_batch == 2
    assert dict(curve.peak.holds) == {"parameters": 100, "gradients": 100, "input": 4, "kept": 88, "transient": 16}


@ALL
def test_layers_sum_to_the_totals_and_the_peak_is_among_them(name: str) -> None:
    curve = everything()[name].curve
    if curve is None:
        assert name == "from a file"
        return
    assert curve.totals == tuple(map(sum, zip(*(sizes for _, sizes in curve.layers))))
    assert max(curve.totals) == curve.peak.total == sum(size for _, size in curve.peak.holds)


@ALL
def test_what_memory_holds_at_the_peak_sums_to_the_predicted_peak(name: str) -> None:
    made = everything()[name]
    holds = peak_holds(made)
    assert sum(size for _, size in holds) == made.plan.predicted.peak + made.plan.held


@pytest.mark.parametrize("points_", [4, 10, 16, 10_000])
def test_a_thinned_curve_keeps_every_phase_at_its_fullest(points_: int) -> None:
    course = handmade.Course().birth("weights", 100, category="parameters").window().phase("input").birth("x", 0, 1, "input")
    course.phase("forward")
    for n in range(40):
        course.birth(f"f{n}", n).death(f"f{n}")
    course.phase("backward")
    for n in range(40):
        course.birth(f"b{n}", 2 * n).death(f"b{n}")
    timeline = course.phase("hand over").phase("optimizer").birth("s", 1).death("s", "x").done()
    curve = curve_of(timeline, 1, accumulates=False, points=points_)
    assert max(curve.totals) == 100 + 1 + 78
    whole = curve_of(timeline, 1, accumulates=False)
    assert curve.moments == whole.moments
    for moment in curve.moments:
        assert moment.total in curve.totals


def test_blocks_keep_what_the_timeline_keeps() -> None:
    costs = {cost.name: cost for cost in block_costs(handmade.two_blocks(), 4, ("a", "b"))}
    assert (costs["a"].kept, costs["b"].kept, costs[""].kept) == (44, 44, 0)
    assert (costs["a"].transient, costs["b"].transient, costs[""].transient) == (4, 4, 16)


def test_blocks_of_the_plan_are_priced_per_step() -> None:
    """Block a's forward takes 10 ms per sample: 160 ms for 16 samples, however they are cut (6 x 3 runs 18)."""
    made = reports.report(330)
    assert (made.plan.micro_batch, made.plan.accumulation) == (6, 3)
    assert {block.name: block.recompute for block in made.blocks} == {
        "a": pytest.approx(0.18),
        "b": pytest.approx(0.18),
        "": None,
    }
    assert [block.checkpointed for block in made.blocks] == ["memfit", "memfit", ""]


def test_offers_are_differences_to_the_plan() -> None:
    """All 16 samples at once, unchecked, need 598 at most: 310 more than 4 x 4 with both blocks, 2 of them are there."""
    made = reports.report(290)
    assert (made.plan.micro_batch, made.plan.predicted.upper, made.room) == (4, 288, 2)
    whole = max((offer for offer in made.offers if offer.lever == "budget"), key=lambda offer: offer.micro_batch)
    assert (whole.micro_batch, whole.accumulation, whole.more, whole.missing) == (16, 1, 310, 308)
    assert whole.seconds == pytest.approx((0.5 + 1 + 1.6) - made.plan.predicted.seconds)


def test_no_larger_micro_batch_is_offered_once_memory_ran_out() -> None:
    def larger(events: list[Any]) -> list[int]:
        made = reports.report(290, events=events)
        return [offer.micro_batch for offer in made.offers if offer.micro_batch > made.plan.micro_batch]

    assert larger([]) == [16]
    assert larger([reports.event(3, "out of memory", "a micro-batch of 8 ran out of memory")]) == []


# ---- made from a run


def loss(model: Any, batch: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_run_reports_each_step_once_and_where_it_draws() -> None:
    run = wrapped(mlp(dropout=0.5), 5, loss_fn=loss)
    for _ in range(3):
        run.step(points())
    made = run.report()
    assert made.pace.steps == len(made.pace.seconds) == 3
    assert made.draws == ("2",)
    assert run.report().verification is None
    run.undo()


def test_a_run_in_script_mode_reports_each_step_once() -> None:
    model, batch = mlp(), points()
    run = wrapped(model, 5, loader=[batch, batch])
    for x, y in run.loader:
        run.optimizer.zero_grad()
        cross_entropy(model, x, y)
        run.optimizer.step()
    made = run.report()
    assert made.pace.steps == len(made.pace.seconds) == len(made.pace.waits) == 2
    assert made.draws == ()
    run.undo()


def test_dropout_that_is_switched_off_draws_nothing() -> None:
    from memfit.reporting.drawing import drawing_modules

    assert drawing_modules(mlp(dropout=0.5)) == ("2",)
    assert drawing_modules(mlp(dropout=0.5).eval()) == ("2",), "a report made during evaluation is about training"
    frozen = mlp(dropout=0.5)
    frozen[2].eval()
    assert drawing_modules(frozen) == ()
    assert drawing_modules(mlp(dropout=0.0)) == ()


# ---- what importing it costs


def test_importing_the_report_imports_nothing_that_draws() -> None:
    code = "import sys, memfit.reporting.report; print([m for m in ('rich', 'plotly', 'jinja2') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
