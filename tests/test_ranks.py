"""Several processes over gloo: what each loads, how often gradients are reduced, and what happens where one fails."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairwise import once
from processes import Processes
from stepping import PieceSizes
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import memfit
from memfit.ranks import buckets

SAMPLES, TARGET = 26, 12


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


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def dataset() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(numbers, torch.randint(0, 3, (SAMPLES,), generator=generator))


def network(*more: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *more, nn.Linear(16, 3)).double()


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loader_of(kind: str) -> DataLoader[Any]:
    torch.manual_seed(100 + 7 * rank())  # scripts do not always seed their processes alike
    if kind == "distributed":
        if "RANK" not in os.environ:  # what all of them divide
            sampler = DistributedSampler(dataset(), num_replicas=1, rank=0, seed=5)
        else:
            sampler = DistributedSampler(dataset(), num_replicas=int(os.environ["WORLD_SIZE"]), rank=rank(), seed=5)
        return DataLoader(dataset(), batch_size=4, sampler=sampler)
    if kind == "generator":
        return DataLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank()))
    return DataLoader(dataset(), batch_size=4, shuffle=True, drop_last=kind == "drop_last")


def trained(mode: str, kind: str, epochs: int = 2) -> tuple[dict[str, torch.Tensor], int]:
    """The parameters after some epochs, and the steps that took."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    source = loader_of(kind)
    settings: dict[str, Any] = {"target_batch": TARGET, "micro_batch": 2}
    if mode == "step":
        settings["loss_fn"] = loss_fn
    run = memfit.wrap(model, optimizer, source, **settings)
    steps = 0
    for epoch in range(epochs):
        if isinstance(source.sampler, DistributedSampler):
            source.sampler.set_epoch(epoch)
        for batch in run.loader:
            steps += 1
            if mode == "step":
                run.step(batch)
            else:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
    run.undo()
    return {name: value.clone() for name, value in model.state_dict().items()}, steps


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


KINDS = ("shuffled", "drop_last", "distributed", "generator")


@pytest.mark.parametrize(("kind", "mode"), once(product(KINDS, ("step", "script"))))
def test_the_parameters_do_not_depend_on_the_number_of_processes(
    mode: str, kind: str, two: Processes, three: Processes
) -> None:
    """The last batch has two samples, so that of three processes one has none."""
    alone, steps = trained(mode, kind)
    for processes in (two, three):
        for found, taken in processes.run(trained, mode, kind):
            assert taken == steps == (4 if kind == "drop_last" else 6)
            assert difference(found, alone) <= 1e-12


def counted(mode: str, accumulation: int, bucket: int, shard: str) -> tuple[int, int]:
    """(sums over processes in two steps, micro-batches that ran in them) of 16 samples each, gradients in buckets of so many
    bytes."""
    model, summed = network(), list[int]()
    optimizer = SGD(model.parameters(), lr=0.1)
    batch = tuple(part[:16] for part in dataset().tensors)  # type: ignore[attr-defined]
    settings: dict[str, Any] = {"loss_fn": loss_fn, "sample": batch} if mode == "step" else {}
    usual, buckets.BUCKET = buckets.BUCKET, bucket
    run = memfit.wrap(model, optimizer, micro_batch=16 // accumulation, shard=shard, **settings)
    buckets.BUCKET, all_reduce = usual, dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        summed.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    ran = PieceSizes(model[0])
    for number in range(4):
        if number == 2:  # planning and proofs are done
            dist.all_reduce = counting
            ran.sizes.clear()
        if mode == "step":
            run.step(batch)
        else:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    dist.all_reduce = all_reduce
    run.undo()
    assert sum(summed) == 2 * sum(p.numel() for p in model.parameters())  # nothing else is summed
    return len(summed), len(ran.sizes)


@pytest.mark.parametrize(("bucket", "collectives"), [(25 << 20, 1), (900, 2)])
@pytest.mark.parametrize("mode", ["step", "script"])
@pytest.mark.parametrize("shard", ["off", "optimizer"])
def test_gradients_are_reduced_once_however_many_micro_batches_there_are(
    shard: str, mode: str, bucket: int, collectives: int, two: Processes
) -> None:
    for accumulation in (1, 4, 16):
        assert two.run(counted, mode, accumulation, bucket, shard) == [(2 * collectives, 2 * accumulation)] * 2


class Fails(nn.Module):
    """Fails in its `at`-th real forward on one rank."""

    def __init__(self, error: Exception, on: tuple[int, ...], times: int) -> None:
        super().__init__()
        self.error, self.on, self.left = error, on, times
        self.armed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed and rank() in self.on and self.left and torch.is_grad_enabled():
            self.left -= 1
            raise self.error
        return x


def survived(mode: str, on: tuple[int, ...], times: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Training in which memory runs out."""
    fails = Fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), on, times)
    model = network(fails)
    optimizer = SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"loss_fn": loss_fn} if mode == "step" else {}
    run = memfit.wrap(model, optimizer, loader_of("distributed"), target_batch=TARGET, micro_batch=4, **settings)
    for number, batch in enumerate(run.loader):
        fails.armed = int(number == 1)
        if mode == "step":
            run.step(batch)
        else:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    events = [event.kind for event in run.events]
    run.undo()
    return model.state_dict(), events


@pytest.mark.parametrize("on", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("mode", ["step", "script"])
def test_a_rank_that_runs_out_of_memory_begins_its_share_again(mode: str, on: tuple[int, ...], two: Processes) -> None:
    want, _ = survived(mode, (), 0)
    for number, (found, events) in enumerate(two.run(survived, mode, on, 1)):
        assert difference(found, want) <= 1e-12
        assert ("out of memory" in events) is (number in on)


def failed(mode: str, on: tuple[int, ...]) -> str:
    try:
        fails = Fails(KeyError("no such word"), on, 1)
        model = network(fails)
        optimizer = SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"loss_fn": loss_fn} if mode == "step" else {}
        run = memfit.wrap(model, optimizer, loader_of("distributed"), target_batch=TARGET, micro_batch=4, **settings)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        fails.armed = True
        for batch in run.loader:
            if mode == "step":
                run.step(batch)
            else:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
    except (KeyError, memfit.RankFailed) as error:
        assert difference(before, model.state_dict()) == 0
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


@pytest.mark.parametrize("mode", ["step", pytest.param("script", marks=pytest.mark.slow)])
def test_another_error_on_one_rank_ends_all_and_says_which(mode: str, doomed: Processes) -> None:
    first, second = doomed.run(failed, mode, (1,))
    assert second.startswith("KeyError")
    assert first.startswith("RankFailed") and "rank 1 failed: KeyError: 'no such word'" in first


def wrapped_as(width: int, target: int) -> str:
    model = nn.Linear(6, 3 + width * rank()).double()
    try:
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), loader_of("shuffled"), target_batch=target + 2 * width * rank())
    except memfit.MemfitError as error:
        return f"{type(error).__name__}: {error}"
    return "wrapped"


def test_processes_that_were_given_different_things_are_told(two: Processes) -> None:
    for text in two.run(wrapped_as, 1, 12):
        assert text.startswith("UsageError") and "they differ in model and optimizer: " in text
    for text in two.run(wrapped_as, 0, 1):
        assert text.startswith("UsageError") and "2 processes train together" in text
    assert two.run(wrapped_as, 0, 12) == ["wrapped", "wrapped"]


def wrapped_where_one_cannot(on: int) -> str:
    model = network()
    try:
        memfit.wrap(
            model, SGD(model.parameters(), lr=0.1), loader_of("shuffled"), target_batch=12, loss_fn=loss_fn,
            budget=1 << 21 if rank() == on else None,
        )
    except memfit.MemfitError as error:
        return f"{type(error).__name__}: {error}"
    return "wrapped"


def test_a_plan_that_does_not_fit_on_one_rank_is_an_error_on_all(doomed: Processes) -> None:
    first, second = doomed.run(wrapped_where_one_cannot, 1)
    assert second.startswith("DoesNotFit")
    assert first.startswith("RankFailed") and "rank 1 failed: DoesNotFit" in first


def beside_another_term(equal: bool) -> str:
    """A mean over valid labels beside a penalty: what it divides by differs between the processes, or not."""
    model = network()
    x, y = torch.randn(6, 4, 6, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.int64)
    if rank() or equal:
        y[:, ::2] = -100  # two in every sample

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out.flatten(0, 1), batch[1].flatten()) + 0.1 * out.square().mean((1, 2)).mean()

    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loss_fn=loss, micro_batch=2)
    try:
        run.step([x, y])
    except memfit.Refused as error:
        return str(error)
    finally:
        run.undo()
    return "a step was done"


def test_a_term_that_the_processes_would_weigh_differently_is_refused(two: Processes) -> None:
    assert two.run(beside_another_term, True) == ["a step was done"] * 2
    for text in two.run(beside_another_term, False):
        assert text.startswith("one loss over all processes") and "a possible denominator of it, or of a term of it" in text


def allowed() -> tuple[int, int]:
    """(what a process may hold, what one by itself could)."""
    model = network()
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loader_of("shuffled"), target_batch=12, loss_fn=loss_fn)
    alone = memfit.probe()
    assert run.plan is not None
    found = run.plan.limit
    run.undo()
    return found, alone.held + (alone.limit - alone.held) // 2


def test_what_is_free_on_a_machine_is_divided_among_its_processes(two: Processes) -> None:
    for found, half in two.run(allowed):
        assert found == pytest.approx(half, rel=0.1)


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(), nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def around_the_forward(begins: int) -> tuple[str, list[float]]:
    """(what is said where a method is called from step `begins` on, in whose gradients processes differ; parameters then)."""
    torch.manual_seed(0)
    model = WithMethod()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, loader_of("shuffled"), target_batch=TARGET, micro_batch=2)
    steps = itertools.count()
    try:
        for _ in range(3):
            for x, y in run.loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss + model.encode(x).square().mean() if next(steps) >= begins else loss).backward()
                optimizer.step()
    except memfit.Refused as error:
        return str(error), []
    finally:
        run.undo()
    return "nothing was said", [float(p.sum()) for p in model.parameters()]


def test_gradients_that_go_around_the_forward_are_averaged(two: Processes) -> None:
    (text, first), (_, second) = two.run(around_the_forward, 0)
    assert text == "nothing was said" and first == second


def test_those_that_begin_between_two_looks_are_noticed(two: Processes) -> None:
    for text, _ in two.run(around_the_forward, 2):
        assert "after 4 steps its parameters are not the same everywhere" in text and "own methods" in text


def evaluated() -> float:
    model = network()
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loader_of("shuffled"), target_batch=TARGET, micro_batch=2)
    for number, batch in enumerate(run.loader):
        loss_fn(model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        if number == 0 and rank() == 0:  # one rank alone
            model.eval()
            with torch.no_grad():
                value = float(loss_fn(model, dataset()[:]))
            torch.save(model.state_dict(), os.devnull)
            model.train()
    run.undo()
    return value if rank() == 0 else 0.0


def test_one_rank_may_evaluate_and_save_alone(two: Processes) -> None:
    assert two.run(evaluated)[0] > 0
