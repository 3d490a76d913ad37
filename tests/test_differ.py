"""Processes that differ: shares by speed, plans by memory, all known everywhere. Numbers alone first, then real processes."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import differing
import pytest
import reports
import torch
from differing import Setting, trained
from hypothesis import given, strategies as st
from processes import Processes

import memfit
from memfit.batches.pieces import divided, part_of
from memfit.distributed.load_balance import Speeds
from memfit.loading.shares import Shares
from memfit.planning.balance import balanced, most_samples, slowest
from memfit.planning.plan import Plan

# ---- numbers

SPEEDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@given(st.integers(0, 300), st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_a_batch_is_divided_without_remainder_and_nobody_is_left_out(samples: int, weights: list[int]) -> None:
    parts = divided(samples, weights)
    assert sum(parts) == samples and min(parts) >= (samples >= len(weights))
    if samples >= sum(weights):
        assert all(abs(part - samples * w / sum(weights)) < 1 for part, w in zip(parts, weights))


@given(st.integers(0, 300), st.integers(1, 9))
def test_equal_weights_are_the_even_division(samples: int, ranks: int) -> None:
    assert divided(samples, (1,) * ranks) == tuple(part_of(samples, rank, ranks) for rank in range(ranks))


@given(st.integers(8, 500), SPEEDS, st.randoms())
def test_shares_are_by_speed_and_within_what_fits(samples: int, seconds: list[float], drawn: random.Random) -> None:
    even = divided(samples, (1,) * len(seconds))
    most = [share + drawn.randrange(samples) for share in even]
    found = balanced(samples, seconds, most)
    assert sum(found) == samples and min(found) >= 1
    assert all(share <= room for share, room in zip(found, most))
    roomy = balanced(samples, seconds, [samples] * len(seconds))
    assert slowest(roomy, seconds) <= slowest(even, seconds) * 1.01 + max(seconds)


def test_what_one_has_no_room_for_the_others_share() -> None:
    assert balanced(12, (1.0, 1.0, 4.0), (12, 12, 12)) == (6, 5, 1)
    assert balanced(12, (1.0, 1.0, 4.0), (4, 12, 12)) == (4, 6, 2)
    assert balanced(12, (1.0, 1.0, 4.0), (4, 4, 4)) == (4, 4, 4)


def seen(speeds: Speeds, seconds: list[float], shares: tuple[int, ...], steps: int) -> int | None:
    """The step in which another division is found, if one is."""
    for step in range(steps):
        if speeds.heard(shares, [s * share for s, share in zip(seconds, shares)], steady=True) and speeds.better(shares):
            return step
    return None


def test_a_rank_is_slower_from_about_a_sixth_on() -> None:
    assert seen(Speeds(), [0.01, 0.01], (50, 50), 200) is None
    assert seen(Speeds(), [0.01, 0.011], (50, 50), 200) is None
    found, soon = seen(Speeds(), [0.01, 0.012], (50, 50), 200), seen(Speeds(), [0.01, 0.03], (50, 50), 200)
    assert found is not None and soon is not None and soon < found < 20


def test_a_disturbance_of_a_second_changes_nothing() -> None:
    speeds, shares = Speeds(), (32, 32)
    for step in range(400):
        slow = 1.29 if step % 40 < 10 else 1.0
        if speeds.heard(shares, [0.1, 0.1 * slow], steady=True):
            assert speeds.better(shares) is None


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equal_ranks_keep_equal_shares_and_do_not_swing(ranks: int) -> None:
    """Each is disturbed by up to 1.29x at times, and always by a tenth."""
    changes = 0
    for seed in range(5):
        drawn, speeds, shares = random.Random(seed), Speeds(), divided(64, (1,) * ranks)
        disturbed = [0.0] * ranks
        for _ in range(2000):
            disturbed = [left or (drawn.uniform(0.2, 3.0) if drawn.random() < 0.01 else 0.0) for left in disturbed]
            took = [
                0.1 * share * ranks / 64 * (1.29 if left else 1.0) * drawn.lognormvariate(0, 0.1)
                for share, left in zip(shares, disturbed)
            ]
            disturbed = [max(0.0, left - each) for left, each in zip(disturbed, took)]
            found = speeds.better(shares) if speeds.heard(shares, took, steady=True) else None
            if found:
                shares = balanced(64, found, [64] * ranks)
                changes += 1
                speeds.changed()
    assert changes <= 4  # in ten thousand steps


@pytest.mark.parametrize("fixed", [0.0, 0.3])
def test_shares_come_to_where_all_are_done_at_once(fixed: float) -> None:
    """Some seconds of a step do not depend on the share."""
    speeds, shares, each = Speeds(), (60, 60), (0.01, 0.03)
    for _ in range(400):
        took = [fixed + s * share for s, share in zip(each, shares)]
        found = speeds.better(shares) if speeds.heard(shares, took, steady=True) else None
        if found:
            shares = balanced(120, found, [120] * 2)
            speeds.changed()
    took = [fixed + s * share for s, share in zip(each, shares)]
    assert max(took) <= 1.1 * min(took)


def test_room_for_a_larger_share() -> None:
    plan = reports.planned(400, 16)
    assert most_samples(plan, 1 << 40) == 16
    least = min(option.cost.upper for option in plan.fitting_with_same_levers())
    assert most_samples(plan, 1) == 16 + plan.room + plan.predicted.upper - least


# ---- the division of an epoch


def test_a_change_begins_with_the_batch_it_is_for_and_lasts() -> None:
    shares = Shares(12, 2)
    shares.begin(shares.latest)
    for number in range(3):
        shares.drawing(number)
    assert shares.position(threading.get_ident()) == (1, 3)
    shares.change(3, (9, 3))
    assert [shares.parts(number, 12) for number in (2, 3, 4)] == [(6, 6), (9, 3), (9, 3)]
    assert shares.parts(5, 4) == (3, 1) and shares.parts(5, 1) == (1, 0)
    shares.begin(shares.latest)
    assert shares.parts(0, 12) == (9, 3)


def test_a_loader_of_another_thread_is_not_changed_within_an_epoch() -> None:
    shares = Shares(12, 2)
    shares.begin(shares.latest)
    assert shares.position(threading.get_ident())[1] == 0
    other = threading.Thread(target=shares.drawing, args=(0,))
    other.start()
    other.join()
    assert shares.position(threading.get_ident())[1] == -1
    shares.fixed = True
    assert shares.position(threading.get_ident())[1] == 0 and shares.parts(0, 12) == (6, 6)


# ---- plans of all


def of_three(plan: Plan) -> Plan:
    poorer = dataclasses.replace(plan.with_share(5), limit=plan.limit // 2)
    return dataclasses.replace(plan, ranks=(plan.of_rank(0), poorer.of_rank(1), plan.of_rank(2)))


def test_a_plan_of_all_is_saved_printed_and_compared(tmp_path: Path) -> None:
    alone = reports.planned(400, 16)
    plan = of_three(alone)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert set(plan.diff(alone)) == {"ranks"} and plan.shares == (16, 5, 16) and alone.shares == (16,)
    assert "rank 1: 5 " in str(plan) and "rank" not in str(alone)


def test_files_of_before_and_damaged_ones() -> None:
    data = json.loads(of_three(reports.planned(400, 16)).to_json())
    assert Plan.from_json(json.dumps({name: value for name, value in data.items() if name != "ranks"})).ranks == ()
    damages = {"share": 0}, {"rank": -1}, {"precision": "float8"}, {"limit": "1"}, {"predicted": 3}, {"more": 1}, {"rank": 2}
    for damage in damages:
        ranks = [data["ranks"][0], {**data["ranks"][1], **damage}, data["ranks"][2]]
        with pytest.raises(memfit.PlanFileError):
            Plan.from_json(json.dumps({**data, "ranks": ranks}))


def test_each_rank_takes_its_own_part_of_a_plan() -> None:
    plan = of_three(reports.planned(400, 16))
    assert plan.on_rank(1, 3).share == 5 and plan.on_rank(1, 3).limit == plan.limit // 2
    assert plan.on_rank(1, 2) is plan  # made by three
    assert plan.on_rank(1, 3).on_rank(0, 3).share == 16


def test_a_plan_for_another_share() -> None:
    plan = reports.planned(400, 16)
    less = plan.with_share(plan.micro_batch + 1)
    assert less.accumulation == 2 and less.micro_batch == plan.micro_batch and less.mode == "accumulate"
    one = plan.with_share(1)
    assert (one.micro_batch, one.accumulation, one.mode) == (1, 1, "whole")
    more = plan.with_share(64)
    assert more.accumulation == -(-64 // plan.micro_batch) and plan.with_share(16) is plan
    assert all(o.accumulation == -(-64 // o.micro_batch) for o in more.options)


# ---- real processes


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    found = Processes(3)
    yield found
    found.end()


@pytest.fixture
def doomed() -> Iterator[Processes]:
    """Two that may not survive the test."""
    found = Processes(2)
    yield found
    found.end()


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["step", "script"])
def test_shares_follow_speeds_and_gradients_stay_those_of_the_whole(mode: str, workers: int, two: Processes) -> None:
    """Rank 1 is three times slower; the last batch of an epoch has one sample, so that a rank has none."""
    setting = Setting(mode, seconds=(0.004, 0.012), samples=161, workers=workers, steps=35)
    alone = trained(setting)
    first, second = two.run(trained, setting)
    assert first.shares[0] == (8, 8)
    fast, slow = first.shares[-1]
    assert fast + slow == 16 and fast >= 11
    assert first.shares == second.shares and first.plan == second.plan
    loaded = {(one, other) for one, other in zip(first.loaded, second.loaded)}
    assert {(8, 8), (1, 0), (fast, slow)} <= loaded
    assert all(sum(pair) in (16, 1) for pair in loaded)
    assert difference(first.parameters, alone.parameters) <= 1e-12
    assert difference(second.parameters, first.parameters) == 0
    assert any("ranks differ in speed by" in message for message in first.messages)


@pytest.mark.slow
def test_three_ranks_of_three_speeds(three: Processes) -> None:
    setting = Setting("step", seconds=(0.003, 0.006, 0.012), target=28, samples=280, steps=40, micro_batch=2)
    alone = trained(setting)
    found = three.run(trained, setting)
    shares = found[0].shares[-1]
    assert shares[0] > 1.5 * shares[1] > 1.5 * shares[2]
    assert all(difference(each.parameters, alone.parameters) <= 1e-12 for each in found)
    assert len({each.plan for each in found}) == 1


@pytest.mark.slow
def test_equal_ranks_keep_equal_shares(two: Processes) -> None:
    first, _ = two.run(trained, Setting("step", seconds=(0.004, 0.004), steps=80))
    assert set(first.shares) == {(8, 8)}


POORER = Setting(
    "step", target=8192, samples=16384, steps=3, micro_batch="auto", double=False, width=1024, budgets=("76MiB", "1GiB", "1GiB")
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["step", "script"])
def test_a_rank_with_less_memory_has_its_share_in_micro_batches_that_fit(mode: str, two: Processes) -> None:
    """The other one may have as many, where these are faster."""
    poor, rich = two.run(trained, dataclasses.replace(POORER, mode=mode))
    assert poor.shares[0] == (4096, 4096) and poor.plan == rich.plan
    assert poor.statistics["accumulation"] > 1
    assert "Every rank" in poor.page and "76.0 MiB" in poor.report and "1.00 GiB" in poor.report
    assert "least room on rank 0" in poor.report


@pytest.mark.parametrize("mode", ["step", pytest.param("script", marks=pytest.mark.slow)])
def test_where_it_does_not_fit_on_one_rank_all_say_which_and_what_it_needs(mode: str, doomed: Processes) -> None:
    setting = dataclasses.replace(POORER, mode=mode, budgets=("1GiB", "3MiB", None))
    (_, first), (_, second) = doomed.outcomes(trained, setting)
    assert "DoesNotFit" in second and "RankFailed" not in second
    assert "RankFailed" in first and "rank 1 failed: DoesNotFit: a batch of 4096 within 3.00 MiB" in first
    assert "it needs" in first


@pytest.mark.parametrize("mode", ["step", "script"])
def test_all_compute_in_the_precision_that_one_needs(mode: str, two: Processes) -> None:
    (precision, said, params), (other, _, others) = two.run(differing.with_little_room_on, 1, mode)
    assert precision == other == ["bfloat16"] * 2
    assert any("computes in bfloat16, because rank 1 does" in message for message in said)
    assert others == params


def test_a_precision_is_asked_for_alike(two: Processes) -> None:
    for text in two.run(differing.asked_differently):
        assert "they differ in precision: off on rank 0, bfloat16 on rank 1" in text


def test_memory_that_ran_out_on_another_rank_is_in_the_report_of_rank_0(two: Processes) -> None:
    report, messages = two.run(differing.running_out_on, 1)[0]
    assert "memory ran out on rank 1, 1 x" in report
    assert any(message.startswith("on rank 1 a micro-batch of 4 ran out of memory") for message in messages)


def test_a_plan_file_gives_every_rank_its_own_part(two: Processes, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    (plan, shares), (others, _) = two.run(differing.by_file, path)
    assert shares == (11, 5) and plan == others
    assert [(each.share, each.micro_batch) for each in plan.ranks] == [(11, 4), (5, 2)]

