"""The search: from profiles and a budget to a plan, checked against trying everything, with numbers for pencil and paper."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from handmade import budget, profile, two_blocks
from hypothesis import given, settings, strategies as st
from test_blocks import steps

from memfit import DoesNotFit, Plan
from memfit._units import parse_bytes
from memfit.batches.pieces import size_runs
from memfit.planning.search import (
    NEARLY,
    Demand,
    keepable,
    kept_bytes,
    micro_batch_sizes,
    search,
    step_seconds,
    with_blocks,
)
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import Timing
from memfit.profiling.timeline import Timeline


def timed(fixed: float = 1.0, each: float = 0.1, block: float = 0.01, **fields: Any) -> Profile:
    """Two blocks of 10 + 1 kept bytes per sample; a micro-batch takes `fixed` and `each` per sample, a block's forward
    `block` per sample; the optimizer half a second."""
    timings = tuple(
        Timing(n, fixed + each * n, 0.3 * (fixed + each * n), (("a", block * n), ("b", block * n))) for n in (1, 2, 4, 16)
    )
    given: dict[str, Any] = {"blocks": ("a", "b"), "timings": timings, "optimizer_seconds": 0.5}
    return profile(two_blocks(), **(given | fields))


def plan_for(room: int, prof: Profile | None = None, share: int = 16, **demand: Any) -> Plan:
    return search([prof or timed()], budget(room), Demand(share=share, target_batch=share, **demand))


def best_by_trying(prof: Profile, room: int, share: int, mode: str = "accumulate") -> float | None:
    """The least seconds of anything that fits; None where nothing does."""
    found = []
    for size in micro_batch_sizes(share):
        pieces = size_runs(share, size)
        for count in range(len(prof.blocks) + 1):
            for blocks in combinations(prof.blocks, count):
                if with_blocks(prof, blocks).peak(size, accumulates=size < share).upper <= room:
                    found.append(step_seconds(prof, pieces, blocks, mode))
    return min((s for s in found if s is not None), default=None)


# ---- what is chosen


def test_with_room_for_all_the_share_runs_whole() -> None:
    plan = plan_for(10_000)
    assert (plan.mode, plan.micro_batch, plan.accumulation, plan.checkpoint) == ("whole", 16, 1, ())
    assert plan.predicted.seconds == pytest.approx(0.5 + 1.0 + 1.6)
    assert plan.asked == plan.predicted


def test_with_less_room_it_runs_in_as_few_pieces_as_fit() -> None:
    """Alive at most: 100 of weights, 100 of gradients and 27 per sample, and an eighth more."""
    plan = plan_for(400, checkpoint=())
    assert [timed().peak(n).upper for n in (4, 6)] == [346, 407]
    assert plan.predicted.upper <= 400
    assert (plan.mode, plan.micro_batch, plan.accumulation) == ("accumulate", 4, 4)  # 5 would take as many pieces


def test_blocks_are_checkpointed_where_that_costs_less_than_smaller_pieces() -> None:
    dear = plan_for(400, timed(block=5.0))
    cheap = plan_for(400, timed(block=0.0001))
    assert dear.checkpoint == ()
    assert cheap.checkpoint and cheap.micro_batch > dear.micro_batch
    assert cheap.predicted.seconds is not None and dear.predicted.seconds is not None
    assert cheap.predicted.seconds < dear.predicted.seconds


def test_the_fastest_size_need_not_be_the_largest() -> None:
    slow_when_large = tuple(Timing(n, 0.1 * n * n + 0.2, 0.1) for n in (1, 2, 4, 8, 16))
    plan = plan_for(10_000, timed(timings=slow_when_large))
    assert plan.micro_batch < 4
    assert any("slower" in option.reason for option in plan.rejected if option.micro_batch == 16)


def test_where_nothing_was_timed_the_fewest_pieces_without_checkpointing_win() -> None:
    plan = plan_for(400, timed(timings=()))
    assert plan.predicted.seconds is None and plan.checkpoint == ()
    assert all(o.micro_batch <= plan.micro_batch or not o.fits or o.checkpoint for o in plan.options)


def test_kernels_for_sizes_that_have_not_run_are_counted() -> None:
    """Sizes 2 and 8 have run; every other size of micro-batch in an epoch keeps 50 more."""
    keeping = timed(kept_per_size=50, timings=tuple(Timing(n, 0.2 + 0.1 * n, 0.1) for n in (2, 8)))
    peaks = {n: keeping.peak(n).upper for n in (2, 5, 8)}
    for size, leftover, new in ((8, 0, 0), (8, 2, 0), (8, 5, 1), (8, None, 1), (5, 0, 1), (2, 9, 1)):
        plan = plan_for(10_000, keeping, micro_batch=size, leftover=leftover, checkpoint=())
        assert plan.predicted.upper == peaks[size] + 50 * new, (size, leftover)


@pytest.mark.parametrize("micro_batch", [1, 3, 5, 16, 40])
def test_a_prescribed_micro_batch_is_kept(micro_batch: int) -> None:
    plan = plan_for(10_000, micro_batch=micro_batch)
    assert plan.micro_batch == min(16, micro_batch)


@pytest.mark.parametrize("blocks", [(), ("a",), ("a", "b")])
def test_prescribed_blocks_are_kept(blocks: tuple[str, ...]) -> None:
    assert plan_for(10_000, checkpoint=blocks).checkpoint == blocks


def test_compiled_models_get_at_most_two_sizes() -> None:
    plan = plan_for(400, equal=True, micro_batch=5)
    assert plan.accumulation == 4  # 5 + 5 + 5 + 1


def test_replay_costs_a_second_forward_of_all_but_one_micro_batch() -> None:
    once, twice = plan_for(400, micro_batch=4), plan_for(400, micro_batch=4, mode="replay")
    assert twice.mode == "replay" and once.mode == "accumulate"
    assert once.predicted.seconds is not None and twice.predicted.seconds is not None
    assert twice.predicted.seconds - once.predicted.seconds == pytest.approx(3 * 0.3 * 1.4)


def test_what_stands_beside_the_profile_is_counted() -> None:
    alone, beside = (plan_for(600, checkpoint=(), **more) for more in ({}, {"standing": 100, "standing_per_sample": 6}))
    assert (alone.micro_batch, beside.micro_batch) == (16, 4)
    assert beside.predicted.upper == timed().peak(4).upper + 100 + 6 * 16 <= 600


def test_a_later_precision_is_taken_only_where_none_before_fits() -> None:
    half = timed(precision="bfloat16", precision_is_lever=True, timings=(Timing(1, 0.001, 0.0003),))
    own = timed(blocks=())
    both = Demand(share=16, micro_batch=16)
    assert search([own, half], budget(10_000), both).precision == "off"
    small = timed(blocks=(), timings=())
    less = profile(None, points=((1, 10), (16, 40)), precision="bfloat16", precision_is_lever=True)
    plan = search([small, less], budget(100), both)
    assert plan.precision == "bfloat16"
    assert {option.precision for option in plan.options} == {"off", "bfloat16"}


# ---- what was not


def test_every_option_but_the_chosen_one_has_a_reason() -> None:
    plan = plan_for(400)
    chosen = [o for o in plan.options if not o.reason]
    assert len(chosen) == 1
    assert (chosen[0].micro_batch, chosen[0].checkpoint) == (plan.micro_batch, len(plan.checkpoint))
    for option in plan.rejected:
        assert option.fits == ("needs up to" not in option.reason)
        if "slower" in option.reason:
            assert option.cost.seconds is not None and plan.predicted.seconds is not None
            assert option.cost.seconds > plan.predicted.seconds


def test_what_the_script_asked_for_is_priced_too() -> None:
    plan = plan_for(400)
    assert plan.asked.peak == timed().peak(16, accumulates=False).expected > 400
    assert plan.asked.seconds == pytest.approx(0.5 + 1.0 + 1.6)


def test_where_nothing_fits_it_says_what_would() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan_for(150)
    error = caught.value
    peak = min((with_blocks(timed(), b).peak(1) for b in ((), ("a", "b"))), key=lambda peak: peak.upper)
    least = peak.upper
    assert peak.expected < least
    assert "a batch of 16 within 150 B" in error.asked
    assert f"it needs {peak.expected} B, at most {least} B, and 150 B are left" in error.found
    assert "parameters and gradients alone take 200 B" in error.found
    (advised,) = re.findall(r"budget='([^']+)' or more", error.next_move)
    assert least <= parse_bytes(advised) <= 1.1 * least
    assert plan_for(least).micro_batch == 1


def test_the_way_out_names_the_levers_that_were_forbidden() -> None:
    with pytest.raises(DoesNotFit, match="allow checkpoint='auto', or allow micro_batch='auto'"):
        plan_for(150, checkpoint=(), micro_batch=8)
    with pytest.raises(DoesNotFit, match="pass a loss_fn="):
        plan_for(300, standing_per_sample=100)


# ---- against trying everything


@settings(max_examples=40, deadline=None)
@given(
    room=st.integers(150, 900),
    share=st.integers(1, 24),
    fixed=st.floats(0.01, 3),
    each=st.floats(0.001, 0.5),
    block=st.floats(0.0001, 1.0),
    mode=st.sampled_from(["accumulate", "replay"]),
)
def test_nothing_that_fits_is_faster(room: int, share: int, fixed: float, each: float, block: float, mode: str) -> None:
    prof = timed(fixed, each, block)
    best = best_by_trying(prof, room, share, mode)
    try:
        plan = plan_for(room, prof, share, mode=mode)
    except DoesNotFit:
        assert best is None
        return
    assert best is not None and plan.predicted.seconds is not None
    assert plan.predicted.upper <= room
    assert plan.predicted.seconds <= best * NEARLY * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(drawn=steps(), share=st.integers(1, 9), tightness=st.floats(0.2, 1.1))
def test_nothing_that_fits_is_faster_for_any_step(
    drawn: tuple[Timeline, dict[str, float]], share: int, tightness: float
) -> None:
    timeline, seconds = drawn
    timings = tuple(Timing(n, 1 + n, 0.3, tuple((name, s * n) for name, s in seconds.items())) for n in (1, 2, 4))
    prof = profile(timeline, blocks=tuple(seconds), timings=timings)
    room = int(prof.peak(share, accumulates=False).upper * tightness)
    best = best_by_trying(prof, room, share)
    try:
        plan = plan_for(room, prof, share)
    except DoesNotFit:
        assert best is None
        return
    assert best is not None and plan.predicted.seconds is not None
    assert plan.predicted.upper <= room
    assert plan.predicted.seconds <= best * NEARLY * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(room=st.integers(150, 900), more=st.integers(0, 500), share=st.integers(1, 24))
def test_more_room_is_never_slower(room: int, more: int, share: int) -> None:
    try:
        small = plan_for(room, share=share)
    except DoesNotFit:
        return
    large = plan_for(room + more, share=share)
    assert large.predicted.seconds is not None and small.predicted.seconds is not None
    assert large.predicted.seconds <= small.predicted.seconds * NEARLY


# ---- parts


@given(st.integers(1, 5000))
def test_sizes_worth_looking_at(share: int) -> None:
    found = micro_batch_sizes(share)
    assert found == tuple(sorted(set(found))) and found[0] == 1 and found[-1] == share
    assert all(-(-share // count) in found for count in range(1, min(16, share) + 1))
    assert len(found) <= 70
    assert micro_batch_sizes(share, most=7) == tuple(n for n in found if n <= 7)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("mode", ["accumulate", "replay"])
def test_a_batch_of_a_million_million_is_planned_as_one_of_a_few(equal: bool, mode: str) -> None:
    """One entry per micro-batch would not fit into any memory."""
    small, large = (plan_for(400, share=share, equal=equal, mode=mode, micro_batch=4) for share in (4 * 10**3, 4 * 10**11))
    assert large.accumulation == 10**8 * small.accumulation == 10**11
    per_sample = [(plan.predicted.seconds or 0.0) / plan.share for plan in (small, large)]
    assert per_sample[0] == pytest.approx(per_sample[1], rel=1e-2)


def test_the_seconds_of_a_step_are_the_sum_of_its_parts() -> None:
    assert step_seconds(timed(), ((4, 2), (2, 1)), (), "accumulate") == pytest.approx(0.5 + 1.4 + 1.4 + 1.2)
    assert step_seconds(timed(), ((4, 1), (2, 1)), ("a",), "accumulate") == pytest.approx(0.5 + 1.4 + 1.2 + 0.06)
    assert step_seconds(timed(timings=()), ((4, 1),), (), "accumulate") is None


def test_replay_keeps_the_micro_batches_that_fit_above_the_peak() -> None:
    prof = timed()
    assert prof.timeline is not None
    assert kept_bytes(prof.timeline, 4, "cuda") == 4 * 22
    each = 4 * 22
    plan = plan_for(400, prof, micro_batch=4, mode="replay", checkpoint=())
    prof = replace(prof, device="cuda")  # on the CPU nodes and holes in the heap count as well
    assert kept_bytes(prof.timeline, 4) > each
    kept = keepable(plan, prof)
    assert kept.keep == 1 + plan.room // each < plan.accumulation
    assert kept.predicted.upper == plan.predicted.upper + each * (kept.keep - 1) <= plan.limit - plan.margin
    assert kept.predicted.seconds is not None and plan.predicted.seconds is not None
    assert plan.predicted.seconds - kept.predicted.seconds == pytest.approx((kept.keep - 1) * 0.3 * 1.4)
    roomy = plan_for(100_000, timed(), micro_batch=4, mode="replay", checkpoint=())
    assert keepable(roomy, prof).keep == 3 and keepable(roomy, prof, 1).keep == 1
    assert keepable(plan_for(400, timed(), micro_batch=4), prof).keep == 0


def test_a_profile_and_a_budget_are_not_changed_by_planning() -> None:
    prof, allowed = timed(), budget(400)
    before = (repr(prof), allowed)
    search([prof], allowed, Demand(share=16))
    assert (repr(prof), allowed) == before
