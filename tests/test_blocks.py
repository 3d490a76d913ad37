"""Choosing blocks to checkpoint: following ways against trying every subset."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from handmade import Course, two_blocks
from hypothesis import given, settings, strategies as st

from memfit.planning import blocks
from memfit.planning.blocks import choose_blocks
from memfit.planning.compose import recomputable, with_checkpoint
from memfit.profiling.timeline import Timeline

SIZE = st.integers(1, 30)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Timeline, dict[str, float]]:
    """One or two micro-batches through some blocks, their sizes drawn: what each saves, needs for a moment, returns, and
    needs in backward; whether it saves its input and its output; whether a mask made at the start goes into all of them.
    And what recomputing each costs."""
    names = [f"b{i}" for i in range(draw(st.integers(1, 4)))]
    shapes = {name: (draw(st.lists(SIZE, min_size=1, max_size=3)), *(draw(SIZE) for _ in range(4))) for name in names}
    saves_input = {name: draw(st.booleans()) for name in names}
    saves_output = {name: draw(st.booleans()) for name in names}
    masked, head, windows = draw(st.booleans()), draw(SIZE), draw(st.integers(1, 2))
    course = Course().birth("weights", 20, category="parameters")
    for w in range(windows):
        course.window().phase("input").birth(f"x{w}", draw(SIZE), 0, "input").phase("forward")
        if masked:
            course.birth(f"mask{w}", 25, 0, "kept")
        before = f"x{w}"
        for name in names:
            kept, moment, out, _, fixed = shapes[name]
            course.enter(name, [before, *([f"mask{w}"] if masked else [])])
            for k, size in enumerate(kept):
                course.birth(f"{name}k{k}{w}", 0, size, "kept", name)
            course.birth(f"{name}t{w}", fixed, moment, owner=name).death(f"{name}t{w}")
            course.birth(f"{name}y{w}", 0, out, "kept", name).leave([f"{name}y{w}"])
            if not saves_input[name]:
                course.death(before)
            before = f"{name}y{w}"
        course.birth(f"loss{w}", 0, head, "kept")
        if masked:
            course.death(f"mask{w}")
        course.phase("backward").death(f"loss{w}")
        for i, name in reversed(list(enumerate(names))):
            kept, _, _, gradient, _ = shapes[name]
            output, follower = f"{name}y{w}", names[i + 1] if i + 1 < len(names) else None
            if not saves_output[name] and (follower is None or saves_input[follower]):
                course.death(output)
            course.birth(f"{name}g{w}", 0, gradient, owner=name)
            course.death(*(f"{name}k{k}{w}" for k in range(len(kept))))
            if saves_output[name] and (follower is None or saves_input[follower]):
                course.death(output)
            course.death(f"{name}g{w}")
        if saves_input[names[0]]:
            course.death(f"x{w}")
        if not w:
            course.birth("gradients", 15, category="gradients")
    course.phase("hand over").death("gradients").phase("optimizer").birth("state", 5).death("state")
    return course.done(), {name: draw(st.integers(1, 9)) / 10 for name in names}


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from combinations(names, count)


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(1, 3), st.floats(0, 1), st.booleans())
def test_following_ways_finds_what_trying_everything_finds(
    step: tuple[Timeline, dict[str, float]], samples: int, where: float, accumulates: bool
) -> None:
    timeline, seconds = step
    recomputes = recomputable(timeline, seconds)
    peaks = {
        names: with_checkpoint(timeline, names).peak(samples, accumulates=accumulates) for names in subsets(list(seconds))
    }
    low, high = min(peaks.values()), max(peaks.values())
    room = round(low - 3 + where * (high - low + 6))
    costs = [sum(seconds[name] for name in names) for names, peak in peaks.items() if peak <= room]
    found = choose_blocks(timeline, recomputes, samples, room, seconds, accumulates=accumulates)
    if not costs:
        assert found is None
        return
    assert found is not None and peaks[found] <= room
    assert sum(seconds[name] for name in found) == pytest.approx(min(costs))


# ---- by hand: 100 of weights, 100 of gradients; per sample 10 + 10 saved by blocks a and b, 7 beside them


@pytest.mark.parametrize(
    ("room", "blocks"),
    [
        (470, ()),
        (469, ("b",)),
        (440, ("b",)),  # 100 + 100 + 10 + 110 of a, then b again: 100 + 10, and its gradient of 10
        (439, ("a",)),
        (370, ("a",)),  # the end of the forward: 100 + 100 + 10 + 10 + 110 + 40
        (369, ("a", "b")),
        (340, ("a", "b")),
        (339, None),
    ],
)
def test_the_cheapest_that_suffices(room: int, blocks: tuple[str, ...] | None) -> None:
    timeline = two_blocks()
    seconds = {"a": 2.0, "b": 1.0}
    assert choose_blocks(timeline, recomputable(timeline, ["a", "b"]), 10, room, seconds) == blocks


@pytest.mark.parametrize(("room", "blocks"), [(470, ()), (469, None)])
def test_without_blocks_there_is_one_way(room: int, blocks: tuple[str, ...] | None) -> None:
    assert choose_blocks(two_blocks(), (), 10, room, {}) == blocks


def test_blocks_that_were_not_timed_cost_next_to_nothing() -> None:
    timeline = two_blocks()
    assert choose_blocks(timeline, recomputable(timeline, ["a", "b"]), 10, 469, {"a": 1.0}) == ("b",)


def test_a_recomputation_that_is_itself_the_peak_is_not_chosen() -> None:
    """Block b saves 10 but needs 50 for a moment while it runs: recomputed beside what a saved it takes more than before."""
    course = Course().window().phase("forward")
    course.enter("a").birth("ka", 20, 0, "kept", "a").birth("ya", 1, 0, "kept", "a").leave(["ya"])
    course.enter("b", ["ya"]).birth("tb", 50).birth("kb", 10, 0, "kept", "b").death("tb").birth("yb", 1).leave(["yb"])
    course.birth("loss", 45).death("loss", "yb").phase("backward")
    course.birth("gb", 15, 0, owner="b").death("kb", "ya", "gb").birth("ga", 1, owner="a").death("ka", "ga")
    timeline = course.done()
    peaks = {names: with_checkpoint(timeline, names).peak(1) for names in subsets(["a", "b"])}
    # forward of b: 20 + 1 + 60; recomputing b: 20 + 1 + 60, after the loss; and without a's 20 all of that
    assert peaks == {(): 81, ("a",): 61, ("b",): 81, ("a", "b"): 61}
    seconds = {"a": 9.0, "b": 1.0}
    recomputes = recomputable(timeline, ["a", "b"])
    assert choose_blocks(timeline, recomputes, 1, 80, seconds) == ("a",)
    assert choose_blocks(timeline, recomputes, 1, 81, seconds) == ()
    assert choose_blocks(timeline, recomputes, 1, 60, seconds) is None


def test_gradients_are_not_counted_before_they_are_there() -> None:
    timeline = two_blocks()
    recomputes, seconds = recomputable(timeline, ["a", "b"]), {"a": 2.0, "b": 1.0}
    assert choose_blocks(timeline, recomputes, 10, 370, seconds, accumulates=False) == ()
    assert choose_blocks(timeline, recomputes, 10, 369, seconds, accumulates=False) == ("b",)


def test_many_unlike_blocks_are_decided_although_not_every_way_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, names = random.Random(1), [f"b{i}" for i in range(9)]
    course, before = Course().birth("weights", 50, category="parameters").window().phase("forward"), []
    for name in names:
        course.enter(name, before).birth(f"k{name}", draw.randint(5, 99), 0, "kept", name)
        before = [f"y{name}"]
        course.birth(before[0], draw.randint(1, 9), 0, "kept", name).leave(before)
    course.birth("loss", 2).phase("backward").death("loss")
    for name in reversed(names):
        course.birth(f"g{name}", 20, owner=name).death(f"k{name}", f"y{name}", f"g{name}")
    timeline, seconds = course.done(), {name: draw.uniform(0.5, 1.5) for name in names}
    peaks = {chosen: with_checkpoint(timeline, chosen).peak(1) for chosen in subsets(names)}
    recomputes, low, high = recomputable(timeline, names), min(peaks.values()), max(peaks.values())
    assert len(set(peaks.values())) > 100
    for followed in (64, 8):
        monkeypatch.setattr(blocks, "FOLLOWED", followed)
        for room in range(low, high, (high - low) // 20):
            found = choose_blocks(timeline, recomputes, 1, room, seconds)
            best = min(sum(seconds[name] for name in chosen) for chosen, peak in peaks.items() if peak <= room)
            assert found is not None and peaks[found] <= room
            assert sum(seconds[name] for name in found) == pytest.approx(best)
