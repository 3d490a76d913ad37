"""Sizes of micro-batches are timed as far as they are admitted; what a size keeps is told from what comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from handmade import profile, two_blocks
from hypothesis import given, strategies as st
from processes import in_a_new_process
from torch import nn

from memfit._units import MiB
from memfit.capture.workloads import StepWork
from memfit.engine.gradients import sparse_parameters
from memfit.engine.staged import Staging
from memfit.engine.weighting import Weighting
from memfit.profiling.seconds import Timing, line_through, measured_sizes, never_slower, timing_at
from memfit.tracing.build_profile import stepping_bytes
from memfit.tracing.timing import Stopwatch, time_sizes

KIB = 1 << 10
SIZES = (1, 2, 4, 8)


def watch_and_work() -> tuple[Stopwatch, StepWork]:
    model, device = nn.Linear(4, 1), torch.device("cpu")
    x = torch.randn(8, 4)
    work = StepWork(model, lambda m, b: m(b).mean(), lambda start, stop: x[start:stop], 8, device, precision="off")
    return Stopwatch(model, Staging(model), Weighting("samples", "by samples"), device), work


@pytest.mark.parametrize("most", SIZES)
def test_sizes_that_are_not_admitted_do_not_run(most: int) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def admit(size: int, found: tuple[Timing, ...]) -> bool:
        asked.append((size, tuple(t.samples for t in found)))
        return size <= most

    timings = time_sizes(*watch_and_work(), SIZES, 5.0, admit)
    assert [t.samples for t in timings] == [n for n in SIZES if n <= most]
    assert all(found == tuple(n for n in SIZES if n < size) for size, found in asked)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_without_time_only_the_smallest_run(least: int) -> None:
    assert len(time_sizes(*watch_and_work(), SIZES, 0.0, least=least)) == least


def test_sizes_run_without_time_where_more_have_to_be_known() -> None:
    found = time_sizes(*watch_and_work(), SIZES, 0.0, regardless=lambda timings: len(timings) < 3)
    assert [timing.samples for timing in found] == [1, 2, 4]


def test_sizes_are_timed_for_longer_where_that_is_asked_for() -> None:
    asked: list[int] = []

    def longer(found: tuple[Timing, ...]) -> bool:
        asked.append(len(found))
        return len(found) == 2

    assert len(time_sizes(*watch_and_work(), SIZES, 0.0, least=2, longer=longer)) == 2
    assert asked == [1, 2]
    sure: list[int] = []
    assert len(time_sizes(*watch_and_work(), SIZES, 5.0, longer=lambda found: bool(sure.append(len(found)) or True))) == 4
    assert sure == [1]  # once is enough


def test_between_measured_sizes_the_excess_lies_on_a_line_and_never_falls() -> None:
    found = profile(two_blocks(), excess=((1, 10), (2, 40), (4, 20), (8, 100)))
    assert [found.excess_at(n) for n in (1, 2, 3, 4, 6, 8, 10)] == [10, 40, 40, 40, 60, 100, 140]


def test_beyond_measured_sizes_a_jump_between_one_sample_and_two_is_not_taken_for_a_slope() -> None:
    found = profile(two_blocks(), excess=((1, 0), (2, 88), (4, 92)))
    assert [found.excess_at(n) for n in (4, 8, 16)] == [92, 100, 116]
    falling = profile(two_blocks(), excess=((1, 0), (2, 80), (4, 10)))
    assert [falling.excess_at(n) for n in (4, 16)] == [80, 80]


def test_where_one_size_was_measured_what_kernels_take_is_in_proportion_to_the_size() -> None:
    """An LSTM of which one sample alone had room was told to fit with 8: by what kernels took for one, and no more."""
    plain = profile(two_blocks())
    assert plain.timeline is not None
    much, little = int(plain.timeline.growth(2)), int(plain.timeline.growth(2)) // 20
    assert [replace(plain, excess=((2, much),)).excess_at(n) for n in (1, 2, 8)] == [much, much, 4 * much]
    assert [replace(plain, excess=((2, little),)).excess_at(n) for n in (1, 2, 8)] == [little, little, little]


@pytest.mark.parametrize(("pinned", "corrected"), [(True, [9, 1, 4]), (False, [9, 9, 9])])
def test_a_smaller_size_hides_what_a_larger_one_takes_only_where_the_library_keeps_what_was_freed(
    pinned: bool, corrected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels differ most for one sample, and where the peak lies in a wide layer for few: that says nothing of many."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, str(64 * KIB if pinned else 64 * MiB))
    own = profile(two_blocks(), "cpu")
    assert own.timeline is not None
    more = ((1, 9), (2, 1), (4, 4))
    timings = tuple(Timing(n, 1.0, 0.4, growth=own.timeline.growth(n) + mib * MiB) for n, mib in more)
    found = own.with_timings(timings, 0.0)
    # what the tensors fill up to whole pages is told by the trace
    assert [round(found.excess_at(n) / MiB, 1) for n in (1, 2, 4)] == corrected


def test_beyond_what_was_measured_a_peak_lies_on_a_line_over_a_factor_of_two() -> None:
    """Two neighbours tell of nothing that is larger than what measurements waver by."""
    points = ((1, 100), (2, 130), (4, 140), (8, 180))
    found = profile(None, points=points, source="measured")
    assert [found.peak(n).expected for n in (1, 3, 8, 16)] == [100, 135, 180, 260]
    assert profile(None, points=points, source="measured", standing=100, stepping=150).peak(1).expected == 250


@pytest.mark.parametrize(("device", "pinned", "upper"), [("cpu", False, 2120), ("cpu", True, 2025), ("cuda", False, 2025)])
def test_a_measured_peak_may_be_exceeded_by_what_a_heap_keeps(
    device: str, pinned: bool, upper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches are timed in a heap that was emptied; in training, other sizes and lengths have left it in pieces."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, str(64 * KIB if pinned else 64 * MiB))
    found = profile(None, device, points=((1, 1200), (2, 1400), (4, 1800)), source="measured", standing=1000)
    assert (found.peak(4).expected, found.peak(4).upper) == (1800, upper)


def test_a_measured_point_is_what_comes_and_goes_on_top_of_what_stands() -> None:
    own = profile(None, source="measured", standing=1000)
    found = own.with_timings((Timing(1, 1.0, 0.4, growth=50, kept=20), Timing(2, 1.0, 0.4, growth=25)), 0.0)
    assert found.points == ((1, 1030), (2, 1030)) and found.kept_per_size == 20


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0),
        (lambda p: torch.optim.AdamW(p, foreach=True), 4),
        (lambda p: torch.optim.AdamW(p, foreach=False), 3),
    ],
)
def test_what_the_optimizers_step_takes_is_told_from_fakes(make: Callable[[Any], torch.optim.Optimizer], copies: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    each = 64 * 64 * 4
    assert stepping_bytes(make(model.parameters()), torch.device("cpu"), -1) == pytest.approx(copies * each, abs=64)
    assert all(p.grad is None for p in model.parameters())


def test_a_sparse_gradient_takes_no_copy_of_its_table_in_the_optimizers_step() -> None:
    model = nn.Sequential(nn.Embedding(1000, 64, sparse=True), nn.Linear(64, 8, bias=False))
    optimizer = torch.optim.Adagrad(model.parameters())
    dense = model[1].weight.nbytes
    for_all = stepping_bytes(optimizer, torch.device("cpu"), -1)
    taken = stepping_bytes(optimizer, torch.device("cpu"), -1, by_rows=sparse_parameters(model))
    assert for_all > model[0].weight.nbytes and 0 < taken <= 4 * dense


def gathering_rows() -> tuple[Timing, int]:
    """(the first micro-batch of a size that names rows no other did, bytes staged after it)."""
    model, device = nn.Embedding(1 << 14, 512, sparse=True), torch.device("cpu")
    rows = torch.arange(1 << 14).view(4, 1 << 12)
    work = StepWork(model, lambda m, b: m(b).mean(), lambda start, stop: rows[start + 1 : stop + 1], 3, device, precision="off")
    staging = Staging(model)
    watch = Stopwatch(model, staging, Weighting("samples", "by samples"), device, reserved=True, trimmed=True)
    with watch.session(work, 1):
        return watch.run(work, 3), staging.staged_bytes()


def test_rows_that_gather_in_a_sparse_gradient_are_not_taken_for_kernels() -> None:
    """8 MiB each. In a new process: the heap of one in which much has run may have room for them, and not grow."""
    timing, staged = in_a_new_process(gathering_rows)
    assert staged == 3 * (1 << 12) * (512 * 4 + 8)
    assert timing.growth is not None and timing.growth >= 2 * (1 << 12) * 512 * 4 and timing.kept < 2 * MiB


def test_micro_batches_are_measured_among_gradients_of_every_parameter() -> None:
    """A gradient that the first micro-batch did not need is not what the second one takes: it counts as standing."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.turns = nn.Linear(4, 1), nn.Linear(4, 1), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turns += 1
            return self.first(x) if self.turns == 1 else self.second(x)

    model, x = Either(), torch.randn(8, 4)
    device, staging = torch.device("cpu"), Staging(model)
    work = StepWork(model, lambda m, b: m(b).mean(), lambda start, stop: x[start:stop], 8, device, precision="off")
    watch = Stopwatch(model, staging, Weighting("samples", "by samples"), device)
    parameters = list(model.parameters())
    with watch.session(work):
        assert all(staging.alias(p).grad is not None for p in parameters)
    assert all(p.grad is None for p in model.parameters())


def test_on_a_busy_machine_no_size_counts_as_slower_per_sample_than_a_smaller_one() -> None:
    timings = (
        Timing(1, 1.0, 0.4, (("a", 0.2),), 10, 3),
        Timing(2, 6.0, 3.0, (("a", 1.2),), 20, 0),
        Timing(4, 3.0, 1.0, (("a", 0.5),), 30, 0),
        Timing(8, 9.0, 3.0, (("a", 1.5),), 40, 0),
    )
    found = never_slower(timings)
    assert [t.seconds for t in found] == pytest.approx([1.0, 2.0, 3.0, 6.0])
    assert [t.forward for t in found] == pytest.approx([0.4, 1.0, 1.0, 2.0])
    assert [dict(t.blocks)["a"] for t in found] == pytest.approx([0.2, 0.4, 0.5, 1.0])
    assert [(t.samples, t.growth, t.kept) for t in found] == [(t.samples, t.growth, t.kept) for t in timings]
    assert [t.told_from for t in found] == [0, 1, 0, 4] and measured_sizes(found) == (1, 4)


def test_seconds_that_are_told_from_another_size_say_so() -> None:
    timings = never_slower((Timing(1, 1.0, 0.4), Timing(64, 100.0, 40.0)))
    found = profile(two_blocks(), timings=timings)
    assert "64.0 s (from micro-batches of 1)" in str(replace(found, timings=(replace(timings[1], growth=1),)))
    tree = found.tree(64)
    assert "not measured at that size: from micro-batches of 1" in tree.seconds_are and tree.seconds_are in str(tree)
    assert "forward time, est." in str(tree) and "forward time, est." not in str(found.tree(1))
    assert found.tree(1).seconds_are == "measured" and "forward time" in str(found.tree(1))


def test_times_between_sizes_that_were_measured_lie_on_a_line() -> None:
    timings = (Timing(2, 2.0, 1.0, (("a", 0.2),), 5, 6), Timing(4, 3.0, 1.4, (("a", 0.4),), 7, 8))
    assert timing_at(timings, 3) == Timing(3, 2.5, pytest.approx(1.2), (("a", pytest.approx(0.3)),))
    assert timing_at(timings, 4) == Timing(4, 3.0, 1.4, (("a", 0.4),))


def test_outside_the_sizes_that_were_measured_times_lie_near_the_line_through_the_nearest_three() -> None:
    affine = tuple(Timing(n, 4.0 + 0.5 * n, 1.0, (("a", 0.2),)) for n in (2, 4, 8, 16))
    assert timing_at(affine, 32).seconds == pytest.approx(20.0, rel=0.1)
    assert timing_at(affine, 1).seconds == pytest.approx(4.5, rel=0.1)
    alike = tuple(Timing(n, float(n), 0.4) for n in (1, 2, 4))
    assert timing_at(alike, 16).seconds == pytest.approx(16.0, rel=0.1)
    far = timing_at(affine, 32)
    assert far.forward / far.seconds == pytest.approx(affine[-1].forward / affine[-1].seconds)
    assert dict(far.blocks)["a"] / far.seconds == pytest.approx(0.2 / affine[-1].seconds)


def test_a_disturbed_timing_does_not_make_larger_micro_batches_cost_nothing() -> None:
    falling = (Timing(1, 5.0, 1.0), Timing(2, 1.0, 0.3))
    assert 1.0 <= timing_at(falling, 16).seconds <= 8.0
    flat = (Timing(1, 1.0, 0.4), Timing(2, 1.01, 0.4))
    assert 0.25 * 16 <= timing_at(flat, 32).seconds <= 16.2
    steep = (Timing(4, 1.0, 0.4), Timing(8, 3.0, 1.0))  # twice the samples, three times the seconds
    assert timing_at(steep, 32).seconds <= 12.0


POINTS = st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 1e3)), min_size=1, max_size=6, unique_by=lambda p: p[0])


@given(POINTS, st.integers(1, 999))
def test_a_sample_never_costs_more_in_a_larger_micro_batch_than_was_measured(points: list[tuple[int, float]], n: int) -> None:
    timings = tuple(Timing(samples, seconds, seconds / 3) for samples, seconds in points)
    fixed, each = line_through(points)
    assert fixed >= 0 and each >= 0 and fixed + each > 0
    found, smallest, largest = timing_at(timings, n), min(points), max(points)
    assert found.samples == n and found.seconds > 0
    if n > largest[0]:
        assert largest[1] * (1 - 1e-9) <= found.seconds <= largest[1] * n / largest[0] * (1 + 1e-9)
    if n < smallest[0]:
        assert smallest[1] * n / smallest[0] * (1 - 1e-9) <= found.seconds <= smallest[1] * (1 + 1e-9)
