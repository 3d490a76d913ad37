"""Which micro-batch sizes are measured while training, and which one is taken."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st

from memfit.autotune.tuner import ENOUGH, Tuner, spread
from memfit.batches.pieces import next_size
from memfit.hardware import clock
from memfit.planning.search import micro_batch_sizes

CPU = torch.device("cpu")


class Machine:
    """A machine on which a micro-batch takes `seconds(size)` per sample."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now, self._seconds = 0.0, seconds
        self.ran: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def run(self, size: int) -> None:
        self.now += size * self._seconds(size)
        self.ran.append(size)


def tuned(
    machine: Machine,
    fitting: tuple[int, ...],
    planned: int,
    share: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_rows: bool = False,
) -> tuple[int, int]:
    """(the size taken, the batches it took to know). `in_rows`: as on a device, whose allocator has no segments for a size that
    was not the latest."""
    monkeypatch.setattr(clock.time, "perf_counter", machine.perf_counter)
    tuner = Tuner(fitting, planned, CPU)
    tuner._row._used = in_rows
    batches = 0
    while not tuner.done:
        batches += 1
        assert batches < 100
        tuner.begin()
        left, pieces = share, []
        while left:
            choice = tuner.next_choice(beside=bool(pieces), most=share)
            pieces.append(next_size(left, choice))
            tuner.expect(choice, pieces[-1])
            left -= pieces[-1]
        for index, piece in enumerate(pieces):
            machine.run(piece)
            tuner.micro_batch_done(index)
    return tuner.best()[0], batches


@pytest.mark.parametrize("best", [1, 3, 6, 11, 16])
def test_the_fastest_size_is_found_though_it_lies_between_those_tried_first(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 1.0 + abs(size - best) / best)
    fitting = micro_batch_sizes(32, most=16)
    assert tuned(machine, fitting, 16, 32, monkeypatch)[0] == best
    assert max(machine.ran) <= 16


@settings(deadline=None)
@given(st.integers(2, 200), st.booleans(), st.data())
def test_no_size_is_tried_that_does_not_fit_and_it_ends(share: int, in_rows: bool, data: st.DataObject) -> None:
    fitting = micro_batch_sizes(share, most=data.draw(st.integers(1, share)))
    optimum, slope = data.draw(st.integers(1, share)), data.draw(st.floats(0.0, 1.0))

    def seconds(size: int) -> float:
        return 1.0 + slope * abs(math.log2(size / optimum))

    machine = Machine(seconds)
    with pytest.MonkeyPatch.context() as patch:
        best, batches = tuned(machine, fitting, fitting[-1], share, patch, in_rows=in_rows)
    assert best in fitting and max(machine.ran, default=1) <= fitting[-1]
    # A micro-batch counts for a size from three quarters of it on.
    assert seconds(best) <= min(seconds(size) for size in spread(fitting)) + slope * math.log2(4 / 3) + 1e-9
    assert batches <= 2 + (8 if in_rows else 4) * ENOUGH * len(fitting)


def test_a_single_size_has_nothing_to_measure() -> None:
    assert Tuner((4,), 4, CPU).done


def test_what_a_failed_pass_proposed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 1.0)
    monkeypatch.setattr(clock.time, "perf_counter", machine.perf_counter)
    tuner = Tuner((1, 2), 2, CPU)
    for _ in range(5):
        tuner.begin()
        tuner.expect(tuner.next_choice(), 2)  # memory runs out before it is done
    assert not tuner.done and tuner.best() == (2, {})


@pytest.mark.parametrize(
    ("sizes", "factor", "found"),
    [
        ((), 2, ()),
        ((1, 2, 3, 4, 6, 8, 11, 16, 32), 2, (1, 2, 4, 8, 16, 32)),
        ((3, 5, 9), 2, (3, 5, 9)),
        ((1, 2, 3, 4, 6, 8, 11, 16, 24), 4, (1, 4, 16, 24)),
        (tuple(range(1, 10)), 4, (1, 4, 9)),
    ],
)
def test_spread(sizes: tuple[int, ...], factor: int, found: tuple[int, ...]) -> None:
    assert spread(sizes, factor) == found


def test_sizes_that_never_come_about_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 1.0 / size)
    assert tuned(machine, (4, 8, 64), 8, 10, monkeypatch)[1] <= 61
    assert 64 not in machine.ran


LENGTHS = sorted((256, 200, *(40,) * 6, *(10,) * 56), reverse=True)
"""A few long samples and many short ones, as sentences are."""


def padded_seconds(elements: int) -> float:
    """A batch in micro-batches of about that many elements: padding is computed, and each micro-batch takes a little itself."""
    return sum(40.0 + count * longest for count, longest in pieces_of(elements))


def pieces_of(elements: int) -> list[tuple[int, int]]:
    found, start = [], 0
    while start < len(LENGTHS):
        count = min(len(LENGTHS) - start, max(1, elements // LENGTHS[start]))
        found.append((count, LENGTHS[start]))
        start += count
    return found


def test_samples_of_different_sizes_are_measured_by_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    fitting = [10 * n for n in micro_batch_sizes(64)]
    tuner = Tuner(fitting, fitting[-1], CPU, whole=True)
    batches = 0
    while not tuner.done:
        batches += 1
        tuner.begin()
        choice = tuner.next_choice()
        pieces = pieces_of(choice)
        tuner.expect_batch(choice, sum(LENGTHS), len(pieces))
        for index, (count, longest) in enumerate(pieces):
            now += 40.0 + count * longest
            tuner.micro_batch_done(index)
    best, rates = tuner.best()
    assert padded_seconds(best) <= 1.05 * min(map(padded_seconds, fitting)) < padded_seconds(fitting[-1])
    assert rates[best] == pytest.approx(padded_seconds(best) / sum(LENGTHS))
    assert batches < 40


def test_a_batch_that_failed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    tuner = Tuner((10, 20), 10, CPU, whole=True)
    tuner.begin()
    tuner.expect_batch(tuner.next_choice(), 40, 4)
    now = 5.0
    tuner.micro_batch_done(0)
    tuner.begin()
    assert tuner.best() == (10, {})
