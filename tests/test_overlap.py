"""Gradients reduced beside the last micro-batch: the same training, whoever fails in it, and nobody waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import wrapped
from processes import Processes
from torch import nn
from torch.optim import AdamW

import memfit
from memfit.autotune.overlap_trials import TRIED, Trials
from memfit.ranks import buckets
from memfit.ranks.overlapped import Buckets

STEPS = 12
SHARES = {1: (24,), 2: (15, 9), 3: (11, 7, 6)}
"""Samples of every batch by rank."""
MICRO = 3
MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(scope="module", params=(2, pytest.param(3, marks=pytest.mark.slow)))
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    found = Processes(request.param)
    yield found
    found.end()


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


@pytest.fixture
def doomed() -> Iterator[Processes]:
    found = Processes(2, patience=30.0)
    yield found
    found.end()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class _Point(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, point: Point) -> torch.Tensor:  # type: ignore[override]
        ctx.point = point
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.point.passed()
        return gradient, None


class Point(nn.Module):
    """A place whose backward fails at its `at`-th visit once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Point.apply(x, self)  # type: ignore[no-any-return]

    def passed(self) -> None:
        self.at -= 1
        if self.at == 0 and self.error is not None:
            if isinstance(self.error, SystemExit):
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.error


class Net(nn.Module):
    """Parameters of several sizes. `seldom` is used where a sample says so, `never` not at all; `ragged` does not lie in one
    piece."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.ModuleList(Point() for _ in range(3))
        self.first = nn.Linear(6, 40)
        self.middle = nn.Linear(40, 40)
        self.ragged = nn.Parameter(torch.randn(8, 40).t())
        self.seldom = nn.Linear(8, 3)
        self.never = nn.Linear(8, 3)
        self.place = nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor, rare: torch.Tensor) -> torch.Tensor:
        x = self.points[0](self.first(x))
        x = self.points[1](torch.tanh(self.middle(torch.tanh(x)) + self.place))
        x = self.points[2](x @ self.ragged)
        out = x[:, :3]
        return out + self.seldom(x) * rare[:, None] if bool(rare.any()) else out


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over valid labels."""
    x, y, rare = batch
    return F.cross_entropy(model(x, rare), y)


def batches(size: int) -> list[list[tuple[torch.Tensor, ...]]]:
    """For every step each rank's part. In some steps the last sample of rank 0 (in its last micro-batch) uses `seldom`."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for step in range(STEPS):
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (24,), generator=generator)
        y[torch.rand(24, generator=generator) < 0.3] = -100
        y[::3] = 1
        rare = torch.zeros(24, dtype=torch.bool)
        if step % 4 >= 2:
            rare[SHARES[size][0] - 1] = True
        found.append(list(zip(*(part.split(SHARES[size]) for part in (x, y, rare)))))
    return found


def plain(size: int) -> list[list[float]]:
    """The states that one process passes through: the micro-batches of all ranks, weighted by their labels."""
    model = built()
    optimizer = AdamW(model.parameters(), lr=0.01)
    states = []
    for step in batches(size):
        optimizer.zero_grad()
        valid = sum(int((y != -100).sum()) for _, y, _ in step)
        for part in step:
            for x, y, rare in zip(*(each.split(MICRO) for each in part)):
                (F.cross_entropy(model(x, rare), y, reduction="sum") / valid).backward()
        optimizer.step()
        states.append(state_of(model, optimizer))
    return states


def built() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net().double()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    moments = [optimizer.state[p].get("exp_avg") for p in model.parameters()]
    return [float(v) for t in (*model.parameters(), *moments) if t is not None for v in t.detach().reshape(-1)]


def trained(
    forced: bool, faults: dict[int, tuple[int, int, int]], error: BaseException | None = None
) -> tuple[list[list[float]], int, list[str]]:
    """(the states passed through, steps that reduced beside the last micro-batch, events). `faults`: by rank the step, point
    and visit at which the backward fails."""
    usual = buckets.BUCKET, buckets.ALONE
    buckets.BUCKET, buckets.ALONE = 4 << 10, 2 << 10  # several collectives, of all kinds
    try:
        model = built()
        optimizer = AdamW(model.parameters(), lr=0.01)
        size = int(os.environ["WORLD_SIZE"])
        run = wrapped(model, MICRO, optimizer=optimizer, loss_fn=loss_fn, share=SHARES[size][rank()])
        assert run._core is not None and run._core.team.reduction is not None and run._core.team.reduction.overlap is not None
        run._core.team.reduction.overlap.forced = forced
        states = []
        for number, step in enumerate(batches(size)):
            failing, point, visit = faults.get(rank(), (-1, 0, 0))
            if number == failing:
                model.points[point].error, model.points[point].at = error or torch.OutOfMemoryError(MEMORY), visit  # type: ignore[union-attr]
            run.step(step[rank()])
            states.append(state_of(model, optimizer))
        found = states, run._core.team.reduction.overlap.ran, [event.kind for event in run.events]
        run.undo()
        return found
    finally:
        buckets.BUCKET, buckets.ALONE = usual


def close(one: list[list[float]], other: list[list[float]]) -> bool:
    assert [len(state) for state in one] == [len(state) for state in other]
    return all(max(abs(a - b) for a, b in zip(*pair)) <= 1e-12 for pair in zip(one, other))


def test_training_is_that_of_one_process(processes: Processes) -> None:
    want = plain(processes.size)
    found = processes.run(trained, True, {})
    for states, ran, _ in found:
        assert ran == STEPS - 2  # all but the first, and the first one where some micro-batches use `seldom`
        assert close(states, want) and states == found[0][0]
    for states, ran, _ in processes.run(trained, False, {}):
        assert ran == 0 and close(states, want)


LAST = {2: (5, 3), 3: (4, 3, 2)}
"""Micro-batches by rank."""


def faulty(size: int, ranks: tuple[int, ...], point: int, steps: tuple[int, ...]) -> dict[int, tuple[int, int, int]]:
    return {r: (steps[i % len(steps)], point, LAST[size][r]) for i, r in enumerate(ranks)}


@pytest.mark.parametrize("point", [0, 1, 2])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_memory_that_runs_out_in_the_last_backward(processes: Processes, ranks: tuple[int, ...], point: int) -> None:
    ranks = tuple(r for r in ranks if r < processes.size)
    want = plain(processes.size)
    found = processes.run(trained, True, faulty(processes.size, ranks, point, (6,)))
    for number, (states, ran, events) in enumerate(found):
        assert close(states, want) and states == found[0][0]
        assert ("out of memory" in events) is (number in ranks)
        assert 4 <= ran < STEPS - 1  # none in the step that failed


def test_memory_that_runs_out_on_one_after_the_other(processes: Processes) -> None:
    want = plain(processes.size)
    for number, (states, _, events) in enumerate(
        processes.run(trained, True, faulty(processes.size, (0, 1), 1, (5, 6)))
    ):
        assert close(states, want) and ("out of memory" in events) is (number < 2)


def drawing(forced: bool, fails: bool) -> tuple[list[float], list[float], int]:
    """(parameters, buffers, steps that reduced so) of a model that draws and writes statistics."""
    torch.manual_seed(7 + rank())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        point = Point()
        model = nn.Sequential(
            nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.4), point, nn.Tanh(), nn.Linear(32, 3)
        ).double()
    run = wrapped(model, 4, optimizer=AdamW(model.parameters(), lr=0.01), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert run._core is not None and run._core.team.reduction is not None and run._core.team.reduction.overlap is not None
    run._core.team.reduction.overlap.forced = forced
    generator = torch.Generator().manual_seed(rank())
    for step in range(5):
        if fails and step == 3 and rank() == 1:
            point.error, point.at = torch.OutOfMemoryError(MEMORY), 3
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        run.step([x, torch.randint(0, 3, (12,), generator=generator)])
    ran = run._core.team.reduction.overlap.ran
    parameters = [float(v) for p in model.parameters() for v in p.detach().reshape(-1)]
    held = [float(v) for b in model.buffers() for v in b.reshape(-1)]
    run.undo()
    return (parameters, held, ran) if rank() == 0 else ([], [], ran)


def test_a_rank_that_gathers_again_because_of_another_draws_and_writes_as_before(two: Processes) -> None:
    plainly, _ = two.run(drawing, False, False)
    (parameters, held, ran), _ = two.run(drawing, True, False)
    assert ran == 4 and (parameters, held) == plainly[:2]
    (parameters, held, ran), _ = two.run(drawing, True, True)
    # Rank 1 cuts its batch smaller and draws otherwise; the batches that rank 0's statistics have seen are as many.
    assert ran < 4 and held[-1] == plainly[1][-1] == 15
    assert max(abs(a - b) for a, b in zip(held, plainly[1])) < 0.5


def ends(kind: str) -> str:
    """The error that ended the training."""
    error: BaseException = KeyError("no such word") if kind == "error" else SystemExit()
    try:
        trained(True, {1: (6, 1, LAST[2][1])}, error)
    except (KeyError, memfit.RankFailed) as found:
        return f"{type(found).__name__}: {found}"
    return "nothing failed"


def test_another_error_ends_all_and_says_which(doomed: Processes) -> None:
    """Long before a collective would give up: those who wait for them are patient for 30 seconds."""
    first, second = doomed.run(ends, "error")
    assert second.startswith("KeyError")
    assert first.startswith("RankFailed") and "rank 1 failed: KeyError: 'no such word'" in first


def test_a_killed_rank_ends_the_others(doomed: Processes) -> None:
    (well, text), (other, _) = doomed.outcomes(ends, "kill")
    assert well and not other
    assert text.startswith("RankFailed") and "has ended, or cannot be reached" in text


def counted(accumulation: int, forced: bool) -> tuple[int, int]:
    """(sums in three steps, elements in them)."""
    usual = buckets.BUCKET, buckets.ALONE
    buckets.BUCKET, buckets.ALONE = 4 << 10, 2 << 10
    model = built()
    run = wrapped(model, 16 // accumulation, loss_fn=loss_fn, share=16)
    assert run._core is not None and run._core.team.reduction is not None and run._core.team.reduction.overlap is not None
    overlap = run._core.team.reduction.overlap
    overlap.forced = forced
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(16, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (16,), generator=generator)
    summed, all_reduce = list[int](), dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        summed.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    for number in range(5):
        dist.all_reduce = counting if number >= 2 else all_reduce
        run.step((x, y, y > -1))
    dist.all_reduce = all_reduce
    found = len(summed), sum(summed)
    assert overlap.ran == (4 if forced else 0)
    beside = len(overlap._buckets.order)
    assert not forced or (beside == 10 and found[0] == 3 * (beside + 1))  # `ragged`, larger than a lane, goes afterwards
    run.undo()
    buckets.BUCKET, buckets.ALONE = usual
    return found


def test_collectives_are_the_buckets_however_many_micro_batches_there_are(two: Processes) -> None:
    elements = 3 * sum(p.numel() for n, p in built().named_parameters() if "never" not in n)
    found = {two.run(counted, accumulation, True)[0] for accumulation in (1, 4, 16)}
    assert len(found) == 1 and found.pop()[1] == elements
    assert two.run(counted, 4, False)[0][1] == elements


class Again(nn.Module):
    """Blocks that reentrant checkpointing computes again, and a weight that two of them share: its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.shared(x)), x, use_reentrant=True)
        return self.head(x)


class Passed(nn.Module):
    """A parameter of a sample's size, whose gradient is a view of what the backward goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.place, self.head = nn.Linear(6, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x) + self.place.view(1, 8)))


KINDS = {"again": Again, "passed": Passed}


def unusual(kind: str, forced: bool, micro_batch: int) -> tuple[list[float], int]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = KINDS[kind]().double()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run = wrapped(model, micro_batch, optimizer=optimizer, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert run._core is not None and run._core.team.reduction is not None and run._core.team.reduction.overlap is not None
    run._core.team.reduction.overlap.forced = forced
    generator = torch.Generator().manual_seed(rank())
    for step in range(5):
        samples = 3 if kind == "again" or step == 0 else 1
        x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        run.step([x, torch.randint(0, 3, (samples,), generator=generator)])
    ran = run._core.team.reduction.overlap.ran
    run.undo()
    return [float(v) for p in model.parameters() for v in p.detach().reshape(-1)], ran


def test_gradients_that_come_in_parts_are_gathered_again(two: Processes) -> None:
    want, _ = two.run(unusual, "again", False, 1)[0]
    for found, ran in two.run(unusual, "again", True, 1):
        assert ran == 0 and max(abs(a - b) for a, b in zip(found, want)) <= 1e-12


def test_what_the_backward_goes_on_with_is_not_changed(two: Processes) -> None:
    want, _ = two.run(unusual, "passed", False, 1)[0]
    for found, ran in two.run(unusual, "passed", True, 1):
        assert ran > 0 and max(abs(a - b) for a, b in zip(found, want)) <= 1e-12


# ---- what is decided, and where


def test_buckets_carry_every_gradient_once_in_parts_no_larger_than_a_lane() -> None:
    parameters = [torch.empty(n) for n in (10, 3000, 20, 30, 0, 700)] + [torch.empty(5, dtype=torch.float16)]
    made = Buckets(parameters, torch.empty(8 << 10, dtype=torch.uint8))
    assert [p.numel() for p in made.parameters] == [10, 3000, 20, 30, 700]
    begun = [place for bucket in made.order if not bucket.start for place in bucket.places]
    assert sorted(begun) == [0, 1, 2, 3, 4]
    assert sum(bucket.numel for bucket in made.order) == 3760
    assert all(bucket.numel * 4 <= made.lanes[0].numel() for bucket in made.order)
    assert made.order[-1].places[-1] == 0 and Buckets(parameters, torch.empty(0, dtype=torch.uint8)).order == []


class Host:
    """A clock whose times are numbers."""

    def between(self, start: float, stop: float) -> float:
        return stop - start


@pytest.mark.parametrize(("beside", "chosen"), [(0.9, True), (0.995, False), (1.1, False)])
def test_the_faster_way_is_kept_by_what_all_have_measured(beside: float, chosen: bool) -> None:
    trials = Trials(Host())  # type: ignore[arg-type]
    ways = [trials.next_way() for _ in range(2 * TRIED)]
    assert ways.count(True) == TRIED and ways[:2] == [True, False]
    for way in ways:
        assert trials.stated() == (0.0, 0.0) and trials.chosen is None
        trials.ran(way, 0.0, beside if way else 1.0)
    trials.heard([trials.stated(), (0.0, 0.0)])
    assert trials.chosen is None  # another does not know yet
    trials.heard([trials.stated(), trials.stated()])
    assert trials.chosen is chosen and trials.next_way() is chosen and trials.stated() == (0.0, 0.0)
