"""What the report says: the first screen answers in order, truthfully, and in the reader's own numbers."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reports

from memfit._units import GiB, KiB, MiB, alike, unit_for
from memfit.cli.saved import report_of
from memfit.planning.plan import Cost, Option, Plan
from memfit.planning.wording import nearest, reason, way
from memfit.reporting.facts import BlockCost, Offer
from memfit.reporting.lines import Answer, answers, comparison, verdict
from memfit.reporting.pace import loader_share, seconds_of, steady
from memfit.reporting.report import Report
from memfit.reporting.tables import tables
from memfit.reporting.verification import Verification, cut_as
from memfit.reporting.words import alike_seconds, blocks_listed, less_or_more, percent, printable, relative, speed

LABELS = ("same training", "not kept equal", "learning rate", "it costs", "memory holds", "so far", "next", "or else")


def said(report: Report, label: str) -> str:
    """The lines under a label of the first screen; "" where it is not there."""
    return "\n".join(line for entry in answers(report) if entry.label == label for line in entry.lines)


def row(report: Report, name: str) -> Any:
    return next(row for row in comparison(report) if row.name == name)


def measured(peak: int | None, room: int = 330, **fields: Any) -> Report:
    """A report with a measured peak. The plan in a room of 330 expects 284 bytes, 319 at most."""
    return reports.report(room, stats={"step": 4, "peak_measured": peak}, **fields)


def ran(*seconds: float, waits: tuple[float, ...] = (), events: Any = (), **fields: Any) -> Report:
    stats = {"step": len(seconds), "peak_measured": None}
    return reports.report(330, seconds=seconds, waits=waits, events=events, stats=stats, **fields)


# ---- does it fit?


@pytest.mark.parametrize(
    ("peak", "label", "tone"),
    [(None, "fits", "good"), (300, "fits", "good"), (319, "fits", "good"), (325, "fits", "open"), (331, "over budget", "bad")],
)
def test_more_than_predicted_is_never_called_good(peak: int | None, label: str, tone: str) -> None:
    entry = verdict(measured(peak))
    assert (entry.label, entry.tone) == (label, tone)
    assert ("measured more than the predicted maximum" in "\n".join(entry.lines)) == (tone != "good")
    assert ("above the predicted maximum" in row(measured(peak), "memory").remark) == (tone != "good")


def test_what_exceeds_the_prediction_on_the_cpu_is_usually_the_heap() -> None:
    made = measured(325)
    assert "C library" not in str(verdict(made).lines)
    assert "C library" in str(verdict(replace(made, allowance=replace(made.allowance, kind="cpu"))).lines)


def test_the_verdict_gives_all_numbers() -> None:
    (line,) = verdict(measured(300)).lines
    assert line == "284 B expected, 319 B at most, 300 B measured; budget 330 B, as asked"


def test_a_plan_beyond_the_budget_does_not_fit() -> None:
    made = measured(None)
    smaller = replace(made, allowance=replace(made.allowance, limit=318))
    assert verdict(smaller).label == "does not fit" and verdict(smaller).tone == "bad"
    assert "budget='319B' or more" in said(smaller, "next")


def test_a_whole_batch_without_levers_fits_as_is() -> None:
    assert verdict(reports.report(800)).label == "fits as is"
    assert verdict(reports.report(400)).label == "fits", "its blocks are checkpointed"
    assert said(reports.report(800), "same training") == "the batch runs whole, as without memfit"


# ---- what changed


def test_the_rows_compare_what_was_asked_with_what_is_done() -> None:
    made = measured(300, seconds=(5.0, 6.0, 7.0))
    assert [r.name for r in comparison(made)] == ["batch", "memory", "per step", "checkpoint", "precision"]
    assert row(made, "batch").asked == "16" and row(made, "batch").here == "16 in 3 micro-batches of at most 6"
    assert row(made, "memory").asked == "532 B, does not fit" and row(made, "memory").here == "284 B of 330 B"
    assert row(made, "memory").remark == "predicted; measured 300 B"
    assert row(made, "per step").asked == "3.10 s if it fit" and row(made, "per step").here == "5.42 s"
    assert row(made, "per step").remark == "predicted; measured 6.00 s"
    assert row(made, "checkpoint").asked == "0 of 2 blocks" and row(made, "checkpoint").here == "2 of 2 blocks"
    assert row(made, "precision").asked == row(made, "precision").here == "float32"


def test_predicted_and_measured_are_in_the_same_unit() -> None:
    plan = replace(reports.planned(330), predicted=Cost(1020 * MiB, 2 * GiB, 0.99), limit=4 * GiB)
    made = measured(1030 * MiB, plan=plan, seconds=(1.01,))
    assert row(made, "memory").here.startswith("1,020 MiB") and "1,030 MiB" in row(made, "memory").remark
    assert row(made, "per step").here == "0.99 s" and row(made, "per step").remark == "predicted; measured 1.01 s"


def test_what_was_not_timed_while_planning_is_told_as_measured() -> None:
    made = ran(1.0, 2.0, 3.0, plan=replace(reports.planned(330), predicted=Cost(284, 319), asked=Cost(532, 598)))
    assert (row(made, "per step").asked, row(made, "per step").here) == ("-", "2.00 s")
    assert row(made, "per step").remark == "measured"
    assert row(reports.report(330, plan=made.plan), "per step").remark == ""


def test_the_batch_is_told_in_micro_batches_and_what_it_is_a_product_of() -> None:
    assert row(reports.report(290), "batch").here == "16 in 4 micro-batches of 4"
    assert row(reports.report(290), "batch").remark == ""
    product = reports.report(
        290, stats={"ranks": 3}, asked={"script_accumulation": "2"}, plan=replace(reports.planned(290), target_batch=None)
    )
    assert row(product, "batch").here == "96, of which 16 in 4 micro-batches of 4"
    assert row(product, "batch").remark == "16 samples x 3 ranks x 2 of your iterations"


def test_samples_of_different_sizes_are_said_to_be_cut_by_size() -> None:
    made = reports.ragged()
    assert row(made, "batch").here == "16 in micro-batches of 2 to 5, by size of sample"
    table = next(t for t in tables(made) if t.title == "Micro-batches by size of sample")
    assert table.rows == (("100", "5", "8"), ("200", "3", "4"), ("300", "2", "2"))


def test_samples_of_which_the_longest_are_cut_are_not_said_to_run_whole() -> None:
    """The median's micro-batch may take all of the share, and that of longer samples not."""
    made = reports.report(800)
    assert made.plan.runs_whole
    cut = replace(made, plan=replace(made.plan, by_size=((100, 16, 20), (300, 6, 6)), median=100), draws=("drop",))
    assert row(cut, "batch").here == "16 in micro-batches of 6 to 16, by size of sample"
    assert "not verified yet" in said(cut, "same training") and verdict(cut).label == "fits"
    assert "dropout" in said(cut, "not kept equal")
    whole = replace(made, plan=replace(made.plan, by_size=((100, 16, 20), (300, 16, 17)), median=100))
    assert row(whole, "batch").here == "16 whole" and "runs whole" in said(whole, "same training")


def test_gradients_in_the_parameters_own_precision_are_named_where_they_gather() -> None:
    plan = replace(reports.planned(330), accumulate_in="param")
    assert "own precision" in said(reports.report(330, plan=plan), "not kept equal") and "own precision" in plan.summary()
    whole = replace(reports.planned(800), accumulate_in="param")
    assert said(reports.report(800, plan=whole), "not kept equal") == ""
    assert "own precision" not in reports.planned(330).summary()


def test_one_plan_is_worded_the_same_in_its_summary_in_its_report_and_from_its_file() -> None:
    for plan in (reports.planned(290), reports.planned(330), reports.planned(800), reports.ragged().plan):
        read = report_of(Plan.from_json(plan.to_json()), Path("plan.json"))
        assert row(read, "batch").here == row(reports.report(330, plan=plan), "batch").here
        assert f"batch {row(read, 'batch').here}" in plan.summary()
        for option in nearest(plan.rejected, plan.micro_batch):
            assert f"{way(option)}: " in str(plan) and reason(option, plan) in str(plan)
            assert reason(option, plan) in " ".join(str(read).split())


def test_a_model_without_blocks_has_none() -> None:
    assert row(reports.report(prof=reports.profile(blocks=())), "checkpoint").here == "none"


def test_a_plan_from_a_file_says_what_it_does_not_know() -> None:
    made = reports.report(plan=reports.planned(330), profile=None, prof=reports.profile())
    assert row(made, "checkpoint").asked == "the script's" and row(made, "checkpoint").here == "2 blocks more"
    assert said(made, "memory holds") == ""


# ---- is it the same training?


def test_the_answers_come_in_order() -> None:
    labels = [entry.label for entry in answers(replace(reports.hostile(), verification=reports.SAME))]
    assert labels == [label for label in LABELS if label in labels]
    assert {"same training", "not kept equal", "it costs", "memory holds", "so far", "next", "learning rate"} <= set(labels)


def same(**fields: Any) -> Answer:
    return answers(reports.report(330, verification=replace(reports.SAME, **fields)))[0]


def test_an_equal_gradient_is_said_once_with_its_floor() -> None:
    entry = same()
    assert (entry.label, entry.tone) == ("same training", "good")
    assert entry.lines == (
        "gradient equals the whole batch's to 3.1e-8 (floor of plain PyTorch 2.8e-8), on 24 samples as 5 + 8 + 11",
    )


@pytest.mark.parametrize("error", [2e-6, math.inf, math.nan])
def test_another_gradient_is_said_with_the_worst_parameter(error: float) -> None:
    entry = same(relative_error=error)
    assert (entry.label, entry.tone) == ("NOT the same", "bad")
    assert "DIFFERS" in entry.lines[0] and "worst a.weight 4e-8" in entry.lines[1] and "allowed 1e-6" in entry.lines[1]


def test_a_floor_that_is_no_rounding_proves_nothing() -> None:
    entry = same(relative_error=0.2, floor=0.2, tolerance=0.8)
    assert entry.tone == "open" and "inconclusive" in entry.lines[0]
    assert not replace(reports.SAME, relative_error=0.2, floor=0.2, tolerance=0.8).passed


def test_what_was_not_compared_is_said() -> None:
    assert "not compared: aten.rand" in "\n".join(same(unsliced=("aten.rand",)).lines)
    assert "batch norm frozen" in "\n".join(same(notes=("batch norm frozen",)).lines)


def test_not_verified_is_open_and_says_how() -> None:
    entry = answers(reports.report(330))[0]
    assert entry.tone == "open" and "memfit.verify(run)" in entry.lines[0]


def test_a_verification_prints_as_its_lines() -> None:
    assert str(reports.SAME) == reports.SAME.lines()[0]
    assert str(Verification(1.0, 0.0, 2, (1, 1), "w", 1.0, 0.0, 1e-6)).splitlines()[0].startswith("gradient DIFFERS")


def test_dropout_is_named_where_the_batch_is_cut() -> None:
    assert "(in drop, 1 more)" in said(reports.report(330, draws=("drop", "attn.drop")), "not kept equal")
    assert said(reports.report(800, draws=("drop",)), "not kept equal") == ""
    assert said(reports.report(330), "not kept equal") == ""


def test_batch_norm_is_named_where_the_batch_is_cut() -> None:
    normed = reports.profile(written_buffers=("a.bn.running_mean", "a.bn.running_var", "a.counter"))
    assert "micro-batch (a.bn)" in said(reports.report(330, prof=normed), "not kept equal")
    assert said(reports.report(800, prof=normed), "not kept equal") == ""
    told = reports.event(0, "not equal", "BatchNorm accepted")
    assert said(reports.report(330, prof=normed, events=[told]), "not kept equal") == "BatchNorm accepted"


def test_accepted_inexactness_and_a_lower_precision_are_named() -> None:
    told = reports.event(0, "not equal", "moe mixes samples: accepted by allow_inexact")
    note = "computes in bfloat16, because nothing fits in float32; it moves the gradient by 0.0042"
    plan = replace(reports.planned(330), precision="bfloat16", notes=(note, "another note"))
    assert said(reports.report(330, events=[told, told], plan=plan), "not kept equal").splitlines() == [told.message, note]
    assert said(reports.report(330, plan=replace(plan, notes=())), "not kept equal") == "computes in bfloat16"


# ---- what did it cost?


def test_the_cost_is_the_median_since_the_plan_last_changed() -> None:
    changed = reports.event(2, "replan", "measured while training")
    assert steady(ran(9.0, 9.0, 9.0, 2.0, 4.0, events=[changed])) == (2.0, 4.0)
    assert steady(ran(9.0, 2.0, events=[reports.event(1, "out of memory", "smaller")])) == (9.0, 2.0), "none since"
    assert steady(ran(1.0, 2.0, events=[reports.event(0, "plan", "planned")])) == (1.0, 2.0)
    assert steady(ran(1.0, 2.0, events=[reports.event(1, "note", "said")])) == (1.0, 2.0)
    made = ran(9.0, 9.0, 9.0, 2.0, 4.0, events=[changed])
    assert said(made, "it costs").splitlines()[0] == "3.00 s per step (median of 2 steps), 5.33 samples/s"


def test_recomputing_halving_by_hand_and_two_passes_are_priced() -> None:
    lines = said(reports.report(330), "it costs")
    assert "recomputing 2 blocks takes about 6.6 % of it" in lines  # 0.36 of 5.42 seconds
    assert "halving the batch by hand until it fits would land at 8 micro-batches of 2: 86 % slower" in lines  # 10.1 to 5.42
    ran_out = [reports.event(1, "out of memory", "a micro-batch of 8 ran out of memory")]
    assert "halving" not in said(reports.report(330, events=ran_out), "it costs")
    replay = replace(reports.planned(330), mode="replay", keep=1)
    assert "two passes" in said(reports.report(330, plan=replay), "it costs")
    assert "except 1 of 3" in said(reports.report(330, plan=replay), "it costs")


def slower_while_training() -> Report:
    """Steps of 4 samples turned out to take twice as long as timed; those of 3 were measured too."""
    plan = reports.planned(290)
    assert plan.predicted.seconds is not None
    options = tuple(replace(o, reason="9% slower", measured=True) if o.micro_batch == 3 else o for o in plan.options)
    own = replace(plan.predicted, seconds=2 * plan.predicted.seconds)
    options = tuple(o if o.reason else replace(o, cost=own, measured=True) for o in options)
    cost = replace(plan.predicted, seconds=2 * plan.predicted.seconds)
    return reports.report(290, plan=replace(plan, predicted=cost, options=options))


def test_seconds_and_reasons_agree_where_only_the_plan_itself_was_measured() -> None:
    """One size fits with its levers: there is nothing to compare with, but steps took longer than they were timed."""
    plan = reports.planned(290)
    assert plan.predicted.seconds is not None
    rate = (1.25 * plan.predicted.seconds - plan.overhead) / plan.share
    made = reports.report(290, plan=plan.measured(plan.micro_batch, {plan.micro_batch: rate}))
    own = made.plan.predicted.seconds
    assert own == pytest.approx(1.25 * plan.predicted.seconds) and made.drift == pytest.approx(1.25)
    told = 0
    for option in made.plan.options:
        found = re.match(r"(\d+)% slower, estimated", option.reason)
        seconds = seconds_of(option, made)
        if found is not None and seconds is not None and own is not None:
            told += 1
            assert seconds / own - 1 == pytest.approx(int(found[1]) / 100, abs=0.006)
    assert told > 1


def test_what_was_timed_while_planning_is_scaled_to_what_was_measured_since() -> None:
    made, before = slower_while_training(), reports.report(290)
    assert (made.drift, before.drift) == (pytest.approx(2), 1)
    assert (row(before, "per step").asked, row(before, "per step").here) == ("3.10 s if it fit", "6.42 s")
    assert (row(made, "per step").asked, row(made, "per step").here) == ("6.20 s if it fit", "12.8 s")
    seconds = {o.micro_batch: (seconds_of(o, made), o.cost.seconds) for o in made.plan.options}
    assert seconds[4][0] == seconds[4][1] and seconds[3][0] == seconds[3][1], "measured"
    assert seconds[16][1] is not None and seconds[16][0] == pytest.approx(2 * seconds[16][1]), "timed while planning"
    assert said(made, "next") == said(before, "next")


# ---- what happened, what next?


def test_only_the_latest_events_are_on_the_first_screen() -> None:
    events = [reports.event(n, "note", f"thing {n}") for n in range(5)]
    assert said(ran(1.0, events=events), "so far").splitlines() == [
        "2 earlier events",
        "step 2: thing 2",
        "step 3: thing 3",
        "step 4: thing 4",
    ]
    assert said(reports.report(330, events=[reports.event(0, "plan", "batch 16 whole")]), "so far") == ""


def test_nothing_is_said_to_have_happened_in_a_step_of_a_plan_that_has_not_run() -> None:
    noted = [reports.event(0, "note", "samples differ in size")]
    planned, running = reports.report(330, events=noted), ran(1.0, events=noted)
    assert said(planned, "so far") == "samples differ in size" and said(running, "so far") == "step 0: samples differ in size"
    columns = {made: next(t.columns for t in tables(made) if t.title == "So far") for made in (planned, running)}
    assert "step" not in columns[planned] and "step" in columns[running]


@pytest.mark.parametrize(("wait", "advised"), [(0.04, False), (0.05, False), (0.06, True), (3.0, True)])
def test_the_loader_is_advised_on_above_five_percent(wait: float, advised: bool) -> None:
    made = ran(1.0, 1.0, 1.0, waits=(5.0, wait, wait))
    assert (loader_share(made) > 0.05) == advised
    assert ("num_workers" in said(made, "next")) == advised


def test_pinned_memory_is_advised_where_there_is_a_device() -> None:
    made = ran(1.0, waits=(1.0,))
    assert "pin_memory" not in said(made, "next")
    assert "pin_memory" in said(replace(made, allowance=replace(made.allowance, kind="cuda")), "next")


def test_more_memory_is_priced_and_one_step_of_each_lever_offered() -> None:
    made = reports.report(290)
    assert said(made, "next").splitlines() == [
        "with 56 B more: 4 micro-batches of 4, no block checkpointed, 5 % faster",
        "with 308 B more: 16 whole, no block checkpointed, 52 % faster",
    ]
    assert said(made, "or else") == "6 micro-batches of at most 3, 1 block checkpointed: 6 B less, 29 % slower"
    assert said(reports.report(800), "next") == "more memory would not make it faster"
    assert said(reports.report(800), "or else").splitlines() == [
        "2 micro-batches of 8: 130 B less, 32 % slower",
        "16 whole, 1 block checkpointed: 180 B less, 5.2 % slower",
    ]


def test_over_the_budget_the_next_move_is_a_smaller_one() -> None:
    made = measured(350)
    on_cpu = replace(made, allowance=replace(made.allowance, kind="cpu"))
    assert "reduce the budget by 20 B" in said(made, "next") and "C library" not in said(made, "next")
    assert "C library" in said(on_cpu, "next")


def test_the_scripts_own_checkpointing_is_priced() -> None:
    made = reports.report(800)
    block = BlockCost("a", 10, 10, 0.31, "the script")
    assert "your script checkpoints 1 block, which takes about 10 % of a step" in said(replace(made, blocks=(block,)), "next")


def test_a_lower_precision_that_is_faster_is_told_with_its_price() -> None:
    made = reports.report(800)
    offer = Offer("precision", 16, 1, 0, "bfloat16", "", -100, -1.55, 0)
    assert "bfloat16: 50 % faster, but moves the gradient" in said(replace(made, offers=(offer,)), "next")


# ---- words and numbers


def test_sizes_to_compare_share_a_unit() -> None:
    assert alike(1020 * MiB, 1030 * MiB) == ("1,020 MiB", "1,030 MiB")
    assert alike(34 * GiB, 300 * MiB) == ("34.0 GiB", "0.29 GiB")
    assert alike(100, 0) == ("100 B", "0 B")
    assert alike(0) == ("0 B",)


def test_durations_to_compare_share_a_unit() -> None:
    assert alike_seconds(0.99, 1.01) == ("0.99 s", "1.01 s")
    assert alike_seconds(0.0009, 0.5) == ("0.90 ms", "500 ms")
    assert alike_seconds(2e-6) == ("2.00 us",)
    assert alike_seconds(60.0, 185.0) == ("60.0 s", "3 min 5 s")
    assert alike_seconds() == ()


@pytest.mark.parametrize(
    ("error", "words"),
    [(3e-8, "3e-8"), (1.54e-7, "1.5e-7"), (0.23, "2.3e-1"), (0.0, "0"), (math.inf, "inf"), (math.nan, "nan")],
)
def test_relative_errors_are_short(error: float, words: str) -> None:
    assert relative(error) == words


def test_differences_are_in_words() -> None:
    assert (less_or_more(-41 * MiB), less_or_more(KiB), less_or_more(0)) == ("41.0 MiB less", "1.00 KiB more", "as much memory")
    assert (speed(0.9, 1.0), speed(1.1, 1.0), speed(1.01, 1.0)) == ("10 % faster", "10 % slower", "as fast")
    assert (percent(0.034), percent(0.5), percent(0.0), percent(1.0)) == ("3.4 %", "50 %", "0 %", "100 %")


def test_units_leave_at_least_two_digits_before_the_point() -> None:
    assert [unit_for([size])[1] for size in (10 * GiB, 9 * GiB, 10 * MiB, 10 * KiB, 5)] == ["GiB", "MiB", "MiB", "KiB", "B"]


def test_blocks_in_a_row_are_named_together() -> None:
    assert blocks_listed([f"h.{n}" for n in range(6)]) == "h.0 to 5"
    assert blocks_listed(["h.0", "h.2", "h.3", "head"]) == "h.0, h.2 to 3, head"
    assert blocks_listed(["0", "1"]) == "0 to 1"
    assert blocks_listed([f"layer{c}" for c in "abcdef"]) == "layera, layerb, layerc, layerd, 2 more"


def test_characters_that_a_terminal_obeys_are_spelled_out() -> None:
    assert printable("a\x1b[31m\n\u202eb") == "a\\x1b[31m\\n\\u202eb"


def test_micro_batches_are_summed() -> None:
    assert cut_as((5, 8, 11)) == "5 + 8 + 11"
    assert cut_as((6,) * 9 + (5, 5)) == "6 x 9 + 5 x 2"
    assert cut_as((9, 8, 7, 6, 5, 4)) == "9 + 8 + 7 + 6 + ... (6 micro-batches)"


def test_the_nearest_options_stay_in_order() -> None:
    options = [Option(n, 1, "off", 0, Cost(1, 1), True, "slower") for n in (1, 2, 4, 8, 16, 32)]
    assert [option.micro_batch for option in nearest(options, 8, 3)] == [4, 8, 16]
    assert nearest(options, 8, 10) == tuple(options)
