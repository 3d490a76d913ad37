"""The timeline: what is alive when, for any number of samples, from numbers written down by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from handmade import Course, two_blocks
from hypothesis import given, strategies as st

from memfit.profiling.timeline import CATEGORIES, Timeline, fit, same_course, split_like


def one_of_each() -> Timeline:
    """weights 100; x 1 per sample; kept 8 + 2 per sample; then a transient of 50 and another of 3 per sample."""
    return (
        Course()
        .birth("weights", 100, category="parameters")
        .phase("input")
        .window()
        .birth("x", 0, 1, "input")
        .phase("forward")
        .birth("kept", 8, 2, "kept", "layer")
        .birth("t", 50)
        .death("t")
        .phase("backward")
        .birth("u", 0, 3)
        .death("u", "kept", "x")
        .phase("optimizer")
        .done()
    )


def test_the_curve_is_what_is_alive_after_each_event() -> None:
    assert one_of_each().curve(10).tolist() == [100, 110, 138, 188, 138, 168, 138, 110, 100]


@pytest.mark.parametrize(("samples", "peak", "event"), [(1, 161, 3), (10, 188, 3), (17, 210, 5), (100, 708, 5)])
def test_the_peak_moves_to_what_grows_faster(samples: int, peak: int, event: int) -> None:
    timeline = one_of_each()
    # 100 + 1n + 8 + 2n + 50 against 100 + 1n + 8 + 2n + 3n: they cross at 16 2/3 samples.
    assert timeline.peak(samples) == peak == max(158 + 3 * samples, 108 + 6 * samples)
    assert timeline.peak_event(samples) == event


def test_at_says_what_it_is_for() -> None:
    timeline = one_of_each()
    assert timeline.at(3, 10) == {"parameters": 100, "input": 10, "kept": 28, "transient": 50}
    assert timeline.at(8, 10) == {"parameters": 100}
    assert sum(timeline.at(5, 7).values()) == timeline.curve(7)[5]


def test_phases_by_event() -> None:
    timeline = one_of_each()
    names = ["present", "input", *["forward"] * 3, *["backward"] * 4]
    assert [timeline.phase_of(event) for event in range(9)] == names
    assert timeline.span("forward") == (2, 5) and timeline.span("optimizer") == (9, 9)
    assert timeline.span("hand over") is None


def test_lifetimes_of_what_survives_end_with_the_recording() -> None:
    born, died = one_of_each().lifetimes()
    assert born.tolist() == [0, 1, 2, 3, 5]
    assert died.tolist() == [9, 8, 7, 4, 6]


def test_a_single_micro_batch_meets_no_staged_gradients() -> None:
    timeline = two_blocks()
    # From the second micro-batch on there are 100 bytes of gradients; forward ends with 1 + 11 + 11 + 4 per sample.
    assert timeline.peak(10) == 100 + 100 + 27 * 10
    assert timeline.peak(10, accumulates=False) == 100 + 27 * 10
    assert timeline.peak(10, accumulates=False) == two_blocks(windows=1).peak(10)
    assert timeline.peak_event(10) > timeline.window[1] > timeline.peak_event(10, accumulates=False)


def test_gradients_of_a_single_micro_batch_count_once_they_are_there() -> None:
    timeline = two_blocks()
    assert timeline.peak(1, accumulates=False) == 202  # weights, gradients, and ga and x of the first micro-batch


def test_growth_is_what_the_last_micro_batch_adds() -> None:
    timeline = two_blocks()
    assert timeline.growth(10) == 270
    alone = two_blocks(windows=1)
    assert alone.growth(1) == 102  # its gradients are born within it


def test_blocks_that_run_again_in_backward_are_the_scripts_own() -> None:
    course = Course().phase("forward").enter("a").birth("y", 1).leave().enter("b").leave().phase("backward")
    timeline = course.enter("a").birth("again", 1).leave().death("again", "y").done()
    assert timeline.recomputed() == ("a",)
    assert two_blocks().recomputed() == ()


# ---- from two sizes to all


def at_size(timeline: Timeline, samples: int) -> Timeline:
    """The timeline as a trace at that size would have it: all bytes fixed."""
    return replace(timeline, fixed=timeline.sizes(samples), per_sample=np.zeros_like(timeline.per_sample))


def test_two_sizes_give_all() -> None:
    whole = one_of_each()
    found = fit(at_size(whole, 2), 2, at_size(whole, 3), 3)
    assert found is not None
    assert found.fixed.tolist() == whole.fixed.tolist() and found.per_sample.tolist() == whole.per_sample.tolist()
    assert [found.peak(n) for n in (1, 5, 77)] == [whole.peak(n) for n in (1, 5, 77)]


def test_what_shrinks_with_the_samples_never_takes_less_than_nothing() -> None:
    small, large = (Course().birth("t", size).death("t").done() for size in (30, 20))
    found = fit(small, 2, large, 3)
    assert found is not None
    assert [found.peak(n) for n in (1, 2, 3, 5, 100)] == [40, 30, 20, 0, 0]


def test_one_size_is_split_as_another_is() -> None:
    like = one_of_each()
    longer = at_size(replace(like, fixed=like.fixed * 2, per_sample=like.per_sample * 2), 3)
    found = split_like(longer, 3, like)
    assert found is not None
    assert found.fixed.tolist() == pytest.approx([200, 0, 16, 100, 0])
    assert found.per_sample.tolist() == pytest.approx([0, 2, 4, 0, 6])


def test_what_was_empty_there_is_taken_to_grow() -> None:
    like = Course().birth("t", 0, 0).death("t").done()
    found = split_like(Course().birth("t", 12).death("t").done(), 3, like)
    assert found is not None and (found.fixed[0], found.per_sample[0]) == (0, 4)


@pytest.mark.parametrize("change", ["order", "kind", "number", "category"])
def test_steps_that_run_otherwise_are_not_mixed(change: str) -> None:
    one = Course().birth("a", 1).birth("b", 2).death("a", "b").done()
    other = {
        "order": Course().birth("a", 1).birth("b", 2).death("b", "a").done(),
        "kind": Course().birth("a", 1).birth("b", 2).death("b").done(),
        "number": Course().birth("a", 1).birth("b", 2).birth("c", 1).death("a", "b").done(),
        "category": Course().birth("a", 1, category="kept").birth("b", 2).death("a", "b").done(),
    }[change]
    assert not same_course(one, other) and same_course(one, one)
    assert fit(one, 2, other, 3) is None and split_like(one, 2, other) is None


# ---- laws


@st.composite
def courses(draw: st.DrawFn) -> Timeline:
    """Any order of births and deaths."""
    course, alive = Course(), []
    for number in range(draw(st.integers(1, 12))):
        for name in [name for name in alive if draw(st.booleans())]:
            alive.remove(name)
            course.death(name)
        category = draw(st.sampled_from(CATEGORIES))
        course.birth(f"t{number}", draw(st.integers(0, 1000)), draw(st.integers(0, 100)), category)
        alive.append(f"t{number}")
    return course.done()


@given(courses(), st.integers(1, 50))
def test_the_peak_is_the_largest_sum_over_categories(timeline: Timeline, samples: int) -> None:
    sums = [sum(timeline.at(event, samples).values()) for event in range(len(timeline.event))]
    assert sums == timeline.curve(samples).tolist()
    assert timeline.peak(samples) == max(sums) == sums[timeline.peak_event(samples)]


@given(courses(), st.integers(1, 50))
def test_more_samples_never_take_less(timeline: Timeline, samples: int) -> None:
    assert timeline.peak(samples) <= timeline.peak(samples + 1)


@given(courses(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 50))
def test_fit_and_split_like_give_back_what_was_traced(timeline: Timeline, few: int, more: int, samples: int) -> None:
    found = fit(at_size(timeline, few), few, at_size(timeline, few + more), few + more)
    again = split_like(at_size(timeline, few), few, timeline)
    assert found is not None and again is not None
    assert found.peak(samples) == pytest.approx(timeline.peak(samples), abs=1)
    assert again.sizes(few).tolist() == pytest.approx(timeline.sizes(few).tolist())
    counted = timeline.sizes(few) > 0  # of what is empty at that size nothing can be known
    assert again.sizes(samples)[counted].tolist() == pytest.approx(timeline.sizes(samples)[counted].tolist())


@given(courses())
def test_everything_lives_between_its_birth_and_its_death(timeline: Timeline) -> None:
    born, died = timeline.lifetimes()
    events = np.arange(len(timeline.event))
    alive = (born[:, None] <= events) & (events < died[:, None])
    assert (alive * timeline.sizes(3)[:, None]).sum(0).tolist() == timeline.curve(3).tolist()
