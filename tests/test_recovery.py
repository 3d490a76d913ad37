"""Running out of memory where nobody foresaw it: the effective batch starts again, smaller, and trains exactly once."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Aside, Notes, mlp, points, unseen, wrapped
from stepping import PieceSizes, is_fake, plain, sgd, stepper
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo.plain import relative_error

import memfit
from memfit.engine.planning_scope import is_planning
from memfit.hardware.exhausted import is_out_of_memory

EXACT = 1e-12

# What torch and its libraries say; the numbers differ from case to case.
TEXTS: dict[str, Callable[[], BaseException]] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
    "cuda": lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas handle": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cudnn handle": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    "cudnn engine": lambda: RuntimeError("GET was unable to find an engine to execute this computation"),
    "cudnn algorithm": lambda: RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    "cufft": lambda: RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cusolver": lambda: RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    "nccl": lambda: RuntimeError("NCCL error: unhandled cuda error, NCCL version 2.21.5\nCuda failure 2 'out of memory'"),
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 17.99 GB, other allocations: 80.00 MB)"),
    "hip": lambda: RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    "hip code": lambda: RuntimeError("HIP error: hipErrorOutOfMemory"),
    "hipblas": lambda: RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    "xpu": lambda: RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "8589934592 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "cpu on Windows": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."),
    "oneDNN primitive": lambda: RuntimeError("could not create a primitive"),
    "oneDNN memory": lambda: RuntimeError("could not create a memory object"),
    "C++": lambda: RuntimeError("std::bad_alloc"),
    "Python": lambda: MemoryError(),
}

OTHERS: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    RuntimeError("Expected all tensors to be on the same device"),
    ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 8])"),
    ValueError("out of memory"),
    KeyError("out of memory"),
    IndexError("index out of range in self"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("name", TEXTS)
def test_every_way_of_saying_that_memory_ran_out_is_known(name: str) -> None:
    assert is_out_of_memory(TEXTS[name]())


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: f"{type(error).__name__}: {error}"[:40])
def test_no_other_error_is_taken_for_one(error: BaseException) -> None:
    assert not is_out_of_memory(error)


class Fuse(nn.Module):
    """Passes its input on, until it is armed: then the next `times` micro-batches fail, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.set = Aside(times=0, skip=0, where="forward", make=TEXTS["torch"], training=False)
        self.seen = Notes()

    def arm(
        self,
        make: Callable[[], BaseException],
        times: int = 1,
        *,
        where: str = "forward",
        skip: int = 0,
        training: bool = False,
    ) -> None:
        """Fail `times` times, after `skip` passes that go well. `training`: not while memfit plans."""
        vars(self.set).update(make=make, times=times, where=where, skip=skip, training=training)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if self.set.where == "forward":
            self.pass_through()
        return _Through.apply(x, self) if self.set.where == "backward" else x

    def pass_through(self) -> None:
        if self.set.training and is_planning():
            return
        if self.set.times and self.set.skip:
            self.set.skip -= 1
        elif self.set.times:
            self.set.times -= 1
            raise self.set.make()


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.fuse.pass_through()
        return gradient, None


class Net(nn.Module):
    """A net with a fuse in the middle, dropout and batch norm on demand."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first, self.fuse, self.last = mlp(dropout=dropout, outputs=8), Fuse(), mlp(inputs=8, seed=1)
        self.norm = nn.BatchNorm1d(8).double() if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fuse(self.norm(self.first(x))))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def kinds(run: memfit.Run) -> list[str]:
    return [event.kind for event in run.events]


# ---- step mode


@pytest.mark.parametrize(
    ("name", "where"),
    # Each text at one of the places; at the other one it is slow.
    [
        pytest.param(name, where, id=f"{name}-{where}", marks=() if i % 2 == at else pytest.mark.slow)
        for i, name in enumerate(TEXTS)
        for at, where in enumerate(("forward", "backward"))
    ],
)
def test_after_any_of_them_the_batch_trains_once_in_smaller_micro_batches(name: str, where: str) -> None:
    model = Net()
    run, seen = stepper(model, loss_fn, 6)
    run.step(points(seed=1))
    want = plain(model, loss_fn, points())[1]
    trained = copy.deepcopy(model)
    model.fuse.arm(TEXTS[name], where=where, skip=1)
    run.step(points())
    assert model.fuse.set.times == 0
    assert relative_error(seen.gradients[1], want) <= EXACT
    assert len(seen.gradients) == 2
    optimizer = sgd(trained)
    loss_fn(trained, points()).backward()
    optimizer.step()
    assert relative_error(dict(model.named_parameters()), dict(trained.named_parameters())) <= EXACT
    assert kinds(run).count("out of memory") == 1
    assert run.plan is not None and (run.plan.micro_batch, run.plan.accumulation) == (3, 4)


def test_the_event_says_what_was_tried_and_what_is_done_now() -> None:
    model = Net()
    run, _ = stepper(model, loss_fn, 6)
    run.step(points())
    model.fuse.arm(TEXTS["cpu"])
    run.step(points())
    event = next(event for event in run.events if event.kind == "out of memory")
    assert event.step == 1
    assert "a micro-batch of 6 ran out of memory" in event.message
    assert "DefaultCPUAllocator: can't allocate memory" in event.message
    assert "restarted at 3" in event.message


def test_it_may_happen_several_times_in_one_batch() -> None:
    model = Net()
    run, seen = stepper(model, loss_fn, 12)
    run.step(points(seed=1))
    want = plain(model, loss_fn, points())[1]
    model.fuse.arm(TEXTS["cudnn"], times=3)
    model.fuse.seen.clear()
    run.step(points())
    assert model.fuse.seen == [12, 6, 3, *[1] * 12]
    assert relative_error(seen.gradients[1], want) <= EXACT
    assert kinds(run).count("out of memory") == 3
    model.fuse.seen.clear()
    run.step(points())
    assert model.fuse.seen == [1] * 12


def test_at_a_single_sample_the_error_is_the_users() -> None:
    model = Net()
    run, seen = stepper(model, loss_fn, 4)
    run.step(points())
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.fuse.arm(TEXTS["torch"], times=99)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run.step(points())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert len(seen.gradients) == 1
    model.fuse.arm(TEXTS["torch"], times=0)
    want = plain(model, loss_fn, points())[1]
    run.step(points())
    assert relative_error(seen.gradients[1], want) <= EXACT


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_ordinary_error_is_not_tried_again(where: str) -> None:
    model = Net()
    run, seen = stepper(model, loss_fn, 4)
    run.step(points())
    model.fuse.arm(lambda: RuntimeError("CUDA error: device-side assert triggered"), where=where)
    model.fuse.seen.clear()
    with pytest.raises(RuntimeError, match="device-side assert"):
        run.step(points())
    assert model.fuse.seen == [4]
    assert "out of memory" not in kinds(run)
    assert len(seen.gradients) == 1 and run.plan is not None and run.plan.micro_batch == 4


def test_random_draws_are_those_of_a_batch_that_never_failed() -> None:
    """As if the smaller micro-batch had been planned: bit for bit the same draws, and the same state afterwards."""
    results = []
    for planned, fails in ((6, 1), (3, 0)):
        model = Net(dropout=0.5)
        run, seen = stepper(model, loss_fn, planned)
        torch.manual_seed(6)
        run.step(points(2, classes=1))
        model.fuse.arm(TEXTS["torch"], times=fails, skip=1, training=True)
        torch.manual_seed(7)
        run.step(points())
        results.append((seen.gradients[1], torch.get_rng_state()))
    (got, state), (want, expected) = results
    assert all(torch.equal(g, w) for g, w in zip(got.values(), want.values()) if g is not None and w is not None)
    assert torch.equal(state, expected)


def test_batch_statistics_count_no_failed_attempt() -> None:
    results = []
    for planned, fails in ((6, 1), (3, 0)):
        model = Net(norm=True)
        run, _ = stepper(model, loss_fn, planned)
        run.step(points(4))  # what it proves is known from here on
        model.load_state_dict(Net(norm=True).state_dict())
        model.fuse.arm(TEXTS["torch"], times=fails, skip=1, training=True)
        run.step(points())
        results.append(model.norm.state_dict())
    got, want = results
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert int(got["num_batches_tracked"]) == 4


def test_a_later_look_at_the_weighting_that_runs_out_of_memory_can_wait() -> None:
    model = Net()
    run, seen = stepper(model, lambda m, batch: loss_fn(m, batch) + 0.01 * next(m.parameters()).square().sum(), 6)
    run.step(points())
    before = copy.deepcopy(model)
    model.fuse.arm(TEXTS["torch"])
    run.step(points())
    want = plain(before, lambda m, batch: loss_fn(m, batch) + 0.01 * next(m.parameters()).square().sum(), points())[1]
    assert relative_error(seen.gradients[1], want) <= 1e-12


def test_what_the_failed_attempt_held_is_free_before_the_next_one() -> None:
    model = Net()
    run, _ = stepper(model, loss_fn, 6)
    run.step(points())
    held: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append([ref() is not None for ref in held])
        held.append(weakref.ref(output))

    model.first.register_forward_hook(look)
    model.fuse.arm(TEXTS["torch"])
    run.step(points())
    assert alive[1] == [False]


def test_the_optimizer_step_is_never_tried_again() -> None:
    model = Net()
    run, _ = stepper(model, loss_fn, 6)
    run.step(points())
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = run.optimizer.register_step_pre_hook(fail)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(torch.OutOfMemoryError):
        run.step(points())
    handle.remove()
    assert calls == [1] and "out of memory" not in kinds(run)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_running_out_of_memory_in_before_step_is_not_tried_again() -> None:
    model = Net()
    calls: list[int] = []

    def before_step() -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run = wrapped(model, 6, loss_fn=loss_fn, before_step=before_step)
    with pytest.raises(torch.OutOfMemoryError):
        run.step(points())
    assert calls == [1]


def test_samples_of_different_sizes_recover_too() -> None:
    samples = [torch.rand(size, 7, dtype=torch.float64) for size in (9, 2, 4, 6, 3, 8, 2, 5, 7, 3, 4, 2)]

    def collate(parts: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def mean_of_means(model: nn.Module, batch: Tensor) -> Tensor:
        there = (batch != 0).any(-1, keepdim=True)
        return ((model(batch) * there).sum((1, 2)) / there.sum((1, 2))).square().mean()

    model = Net()
    seen = []
    run = memfit.wrap(
        model,
        sgd(model),
        torch.utils.data.DataLoader(samples, batch_size=6, collate_fn=collate),  # type: ignore[arg-type]
        loss_fn=mean_of_means,
        target_batch=12,
        before_step=lambda: seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}),
    )
    sizes = PieceSizes(model.first)
    for _ in range(6):  # sizes of micro-batches are settled by then
        for batch in run.loader:
            run.step(batch)
    want = plain(model, mean_of_means, collate(samples))[1]
    sizes.sizes.clear()
    assert run.plan is not None and run.plan.by_size
    before = run.plan
    model.fuse.arm(TEXTS["torch"])
    for batch in run.loader:
        run.step(batch)
    assert relative_error(seen[-1], want) <= EXACT
    if before.micro_batch > 1:
        assert run.plan.micro_batch == before.micro_batch // 2
    assert sum(sizes.sizes) > 12


def test_recomputing_a_checkpointed_block_may_fail_too() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(mlp(outputs=7)), nn.Sequential(mlp(outputs=7, seed=1))])
            self.fuse = Fuse()
            self.blocks[1].append(self.fuse)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Blocks()
    run = wrapped(model, 6, fields={"checkpoint": ("blocks.0", "blocks.1")}, loss_fn=loss_fn)
    run.step(points(2))
    want = plain(model, loss_fn, points())[1]
    # One forward goes well, and the recomputation in its backward fails.
    model.fuse.arm(TEXTS["torch"], skip=1)
    run.step(points())
    assert model.fuse.set.times == 0
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) <= EXACT
    assert kinds(run).count("out of memory") == 1


class Dropping(Net):
    """A net that leaves layers out by draws outside torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.left_out = draw, nn.ModuleList(mlp(outputs=7, seed=seed) for seed in range(3))
        self.taken = Notes()

    def forward(self, x: Tensor) -> Tensor:
        self.taken.append(tuple(self.draw() < 0.5 for _ in self.left_out))
        for layer, take in zip(self.left_out, self.taken[-1]):
            x = x + layer(x) if take else x
        return super().forward(x)


DRAWS = pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "NumPy"])


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@DRAWS
def test_layers_left_out_by_draws_outside_torch_are_the_same_after_a_failure(draw: Callable[[], float]) -> None:
    results = []
    for planned, fails in ((6, 1), (3, 0)):
        model = Dropping(draw)
        run, seen = stepper(model, loss_fn, planned)
        seeded(6)
        run.step(points(2, classes=1))
        model.fuse.arm(TEXTS["torch"], times=fails, skip=1, training=True)
        model.taken.clear()
        seeded(3)
        run.step(points())
        results.append((seen.gradients[1], model.taken[-4:], draw()))
    assert results[0][1:] == results[1][1:]
    assert len(set(results[0][1])) > 1
    assert relative_error(results[0][0], results[1][0]) == 0.0


@DRAWS
def test_a_second_pass_leaves_out_the_layers_that_the_first_did(draw: Callable[[], float]) -> None:
    model = Dropping(draw)
    wrapped(model, 3)
    for seed in range(3):
        out = model(points(seed=seed)[0])  # decides and proves; runs nothing of the batch yet
        seeded(seed)
        model.taken.clear()
        loss = unseen(out).exp().mean()
        first, after = list(model.taken), draw()
        model.taken.clear()
        loss.backward()
        assert model.taken == first
        seeded(seed)
        assert [tuple(draw() < 0.5 for _ in range(3)) for _ in range(4)] == first and draw() == after


@DRAWS
@pytest.mark.parametrize("checkpoint", ["off", "all"])
def test_leaving_layers_out_is_no_mixing_of_samples(draw: Callable[[], float], checkpoint: str) -> None:
    """Every micro-batch draws for itself, as with dropout; proofs, tracing and recomputing meet the same draws."""

    class Block(Dropping):
        def __init__(self) -> None:
            super().__init__(draw)
            self.last = mlp(inputs=8, outputs=7, seed=1)

    for seed in range(3):
        model = nn.Sequential(nn.Sequential(Block(), Block()), mlp())
        seeded(seed)
        run = memfit.wrap(model, sgd(model), loss_fn=loss_fn, sample=points(), micro_batch=5, checkpoint=checkpoint)
        assert run.plan is not None and run.plan.accumulation == 3
        assert bool(run.plan.checkpoint) == (checkpoint == "all")
        run.step(points())
        assert memfit.verify(run).passed


# ---- script mode


def known(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def unknown(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.softplus(unseen(model(x))).gather(1, y[:, None]).log().square().sum()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("loss", "where", "skip"),
    [
        pytest.param(known, "forward", 1, id="accumulate, forward"),
        pytest.param(known, "backward", 1, id="accumulate, backward"),
        pytest.param(unknown, "forward", 1, id="replay, first pass"),
        pytest.param(unknown, "forward", 3, id="replay, second pass"),
        pytest.param(unknown, "backward", 1, id="replay, backward"),
    ],
)
def test_script_mode_recovers_wherever_its_passes_fail(loss: Any, where: str, skip: int, times: int) -> None:
    model = Net()
    run = wrapped(model, 6)
    loss(model, *points(seed=1)).backward()
    model.zero_grad()
    want = plain(model, lambda m, b: loss(m, *b), points())[1]
    model.fuse.arm(TEXTS["cublas"], times, where=where, skip=skip)
    loss(model, *points()).backward()
    assert model.fuse.set.times == 0
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) <= EXACT
    assert kinds(run).count("out of memory") == times
    model.zero_grad()
    model.fuse.seen.clear()
    loss(model, *points()).backward()
    assert max(model.fuse.seen) <= 6 // 2**times
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) <= EXACT


class Counting(Net):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def running_whole(model: Any, loss: Any, planned: bool) -> memfit.Run:
    """A run whose batches run whole: they fit, or a plan made elsewhere says so."""
    optimizer = sgd(model)
    run = wrapped(model, 12, optimizer=optimizer) if planned else memfit.wrap(model, optimizer, budget="2GiB")
    for seed in range(2):
        model.fuse.seen.clear()
        optimizer.zero_grad()
        loss(model, *points(seed=seed)).backward()
        optimizer.step()
    assert model.fuse.seen == [12]
    optimizer.zero_grad()
    return run


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("loss", [known, unknown])
def test_a_batch_that_ran_out_of_memory_whole_is_cut(loss: Any, planned: bool) -> None:
    model = Net()
    run = running_whole(model, loss, planned)
    want = plain(model, lambda m, b: loss(m, *b), points())[1]
    for failures in (1, 0):
        model.fuse.arm(TEXTS["cudnn"], failures)
        model.zero_grad()
        loss(model, *points()).backward()
        assert model.fuse.set.times == 0
        assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) <= EXACT
    model.fuse.seen.clear()
    loss(model, *points()).backward()
    assert max(model.fuse.seen) <= 6
    assert kinds(run).count("out of memory") == 1


def test_a_whole_that_failed_leaves_draws_and_statistics_as_they_were() -> None:
    model = Net(dropout=0.5, norm=True)
    running_whole(model, known, planned=False)
    before, state = copy.deepcopy(model.norm.state_dict()), torch.get_rng_state()
    model.fuse.arm(TEXTS["torch"])
    model(points()[0])  # cut: it runs with its loss
    assert model.fuse.set.times == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.norm.state_dict().items())


def test_what_a_failed_whole_may_have_moved_is_not_run_again() -> None:
    model = Counting()
    running_whole(model, known, planned=False)
    model.fuse.arm(TEXTS["torch"])
    with pytest.raises(torch.OutOfMemoryError):
        known(model, *points())
    assert model.calls == 3


class Bank(Net):
    """Holds rows that its forward may write."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.written = written
        self.register_buffer("rows", torch.zeros(977, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.written:
            self.rows.add_(1)
        return super().forward(x)


class Copies(TorchDispatchMode):
    """Counts copies of tensors of a shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = "clone" in str(function) or "_to_copy" in str(function)
        self.count += named and tuple(args[0].shape) == self.shape
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_a_whole_call_copies_no_buffers(planned: bool, written: bool) -> None:
    model = Bank(written=written)
    running_whole(model, known, planned)
    with Copies(977, 3) as copies:
        known(model, *points()).backward()
    assert copies.count == 0
    model.fuse.arm(TEXTS["torch"])
    before = model.rows.clone()
    if not written:
        model(points()[0])
    else:
        with pytest.raises(torch.OutOfMemoryError):
            model(points()[0])
    assert torch.equal(model.rows, before + written)


@pytest.mark.parametrize("loss", [known, unknown])
def test_script_mode_draws_as_if_nothing_had_failed(loss: Any) -> None:
    gradients = []
    for planned, fails in ((6, 1), (3, 0)):
        model = Net(dropout=0.5)
        wrapped(model, planned)
        torch.manual_seed(2)
        loss(model, *points(seed=1)).backward()
        model.zero_grad()
        model.fuse.arm(TEXTS["torch"], fails)
        torch.manual_seed(3)
        loss(model, *points()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert relative_error(*gradients) == 0.0


@pytest.mark.parametrize("loss", [known, unknown])
def test_script_mode_lets_the_error_through_at_a_single_sample(loss: Any) -> None:
    model = Net()
    wrapped(model, 6)
    loss(model, *points()).backward()
    model.zero_grad()
    model.fuse.arm(TEXTS["torch"], times=99)
    with pytest.raises(torch.OutOfMemoryError):
        loss(model, *points()).backward()
    assert all(p.grad is None for p in model.parameters())
    model.fuse.arm(TEXTS["torch"], times=0)
    want = plain(model, lambda m, b: loss(m, *b), points())[1]
    loss(model, *points()).backward()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) <= EXACT


def test_a_gradient_scaler_of_the_script_is_left_where_it_was() -> None:
    scales, parameters = [], []
    for fails in (1, 0):
        model = Net()
        optimizer = sgd(model)
        wrapped(model, 6, optimizer=optimizer)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        for seed in range(4):
            if seed == 2:
                model.fuse.arm(TEXTS["torch"], fails, skip=1)
            optimizer.zero_grad()
            scaler.scale(known(model, *points(seed=seed))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.state_dict())
        parameters.append(dict(model.named_parameters()))
    assert scales[0] == scales[1]
    assert relative_error(*parameters) <= EXACT


# ---- proofs


class Short(Net):
    """A net on a device with room for so many samples at once, as long as it is short of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.room: int | None = None
        self.sizes = Notes()
        self.first.register_forward_pre_hook(self._check)

    def _check(self, module: nn.Module, args: Any) -> None:
        if is_fake(args[0]):
            return
        self.sizes.append(len(args[0]))
        if self.room is not None and len(args[0]) > self.room:
            raise TEXTS["torch"]()


def unproven_losses(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return -(model(x).log_softmax(1).gather(1, y[:, None])).mean()


def messages(run: memfit.Run) -> str:
    return " ".join(event.message for event in run.events if event.kind == "out of memory")


def own_gradients(model: nn.Module) -> dict[str, Any]:
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("loss", [known, unknown])
def test_a_proof_that_runs_out_of_memory_runs_on_fewer_samples(loss: Any) -> None:
    model = Short()
    want = plain(model, lambda m, b: loss(m, *b), points())[1]
    run = wrapped(model, 2)
    model.room = 2
    loss(model, *points()).backward()
    assert relative_error(own_gradients(model), want) <= EXACT
    assert "a proof on 5 samples ran out of memory (CUDA out of memory" in messages(run)
    assert "restarted on 2" in messages(run)
    assert max(size for size in model.sizes if size != 5) == 2 and model.sizes.count(5) == 1


@pytest.mark.parametrize("loss", [known, unknown])
def test_a_repeated_proof_that_cannot_run_is_left_out_and_said(loss: Any) -> None:
    model = Short()
    run = wrapped(model, 1)
    loss(model, *points(seed=1)).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    want = plain(model, lambda m, b: loss(m, *b), points())[1]
    model.room = 1
    loss(model, *points()).backward()
    assert relative_error(own_gradients(model), want) <= EXACT
    assert "was not repeated" in messages(run)
    run.optimizer.step()
    model.sizes.clear()
    loss(model, *points()).backward()
    assert max(model.sizes) == 1


def test_a_first_proof_that_fits_nowhere_is_the_users_error() -> None:
    model = Short()
    wrapped(model, 1)
    model.room = 1
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        known(model, *points()).backward()
    model.room = None
    want = plain(model, loss_fn, points())[1]
    known(model, *points()).backward()
    assert relative_error(own_gradients(model), want) <= EXACT


@pytest.mark.parametrize(("room", "loss"), [(2, unproven_losses), (1, loss_fn)])
def test_step_mode_proves_on_what_there_is_room_for(room: int, loss: Any) -> None:
    """On fewer samples, and where not even two fit, only losses that need no proof are cut."""
    model = Short()
    want = plain(model, loss, points())[1]
    run, seen = stepper(model, loss, None, micro_batch=room)
    model.room = room
    run.step(points())
    assert relative_error(seen.gradients[0], want) <= EXACT
    assert "a proof on 5 samples ran out of memory" in messages(run)
    assert any("two samples do not fit at once" in event.message for event in run.events) == (room == 1)
