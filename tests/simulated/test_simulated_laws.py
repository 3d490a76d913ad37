"""memfit within a device's capacity: what is survived, what is left behind, and how often the host waits.

The laws of gradients are in tests/gpu, which runs on the simulated device as well.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import simcuda
import torch
import torch.nn.functional as F
from helpers import Forwards
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from zoo import FAMILIES, first_batch
from zoo.plain import relative_error

import memfit
from memfit.capture.workloads import moved
from memfit.hardware.budget import margin_for

MiB = 1 << 20
WIDE = 2048


def net(dtype: torch.dtype = torch.float64, device: str = "cuda") -> nn.Sequential:
    """A net whose hidden layer takes 16 KiB per sample and tensor in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDE), nn.Tanh(), nn.Linear(WIDE, 4)).to(device, dtype)


def points(n: int, device: str = "cuda", seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 16, generator=generator, dtype=dtype), torch.randint(0, 4, (n,), generator=generator)
    return x.to(device), y.to(device)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def parameters(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def trained(model: nn.Module, batches: list[Any], mode: str, *, wrap: bool = True, **settings: Any) -> memfit.Run | None:
    """Trains by SGD, one step per batch, in a mode or by hand."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    run = None
    if wrap:
        run = memfit.wrap(model, optimizer, **({"loss_fn": loss_fn} if mode == "step" else {}), **settings)
    for batch in batches:
        if run is not None and mode == "step":
            run.step(batch)
            continue
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return run


def plainly(batches: list[Any]) -> dict[str, Tensor | None]:
    """The parameters after the same training on the CPU."""
    model = net(device="cpu")
    trained(model, [tuple(each.cpu() for each in batch) for batch in batches], "script", wrap=False)
    return parameters(model)


MODES = pytest.mark.parametrize("mode", ["script", "step"])


@MODES
def test_a_batch_that_does_not_fit_trains_in_pieces(mode: str) -> None:
    batches = [points(2048, seed=seed) for seed in range(2)]
    want = plainly(batches)
    simcuda.set_capacity(64 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        trained(net(), batches, mode, wrap=False)
    model = net()
    run = trained(model, batches, mode)
    assert relative_error(parameters(model), want) <= 1e-12
    assert run is not None and run.plan is not None and run.plan.accumulation > 1
    assert not [event for event in run.events if event.kind == "out of memory"]


@MODES
@pytest.mark.parametrize("allocation", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 12, 20, 31))])
def test_an_allocation_that_fails_in_a_step_is_survived(mode: str, allocation: int) -> None:
    batches = [points(64, seed=seed) for seed in range(3)]
    want, model = plainly(batches), net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    run = memfit.wrap(model, optimizer, micro_batch=16, **({"loss_fn": loss_fn} if mode == "step" else {}))
    for i, batch in enumerate(batches):
        if mode == "step":
            simcuda.fail_in(allocation if i == 1 else -1)
            run.step(batch)
        else:
            optimizer.zero_grad()
            simcuda.fail_in(allocation if i == 1 else -1)
            loss_fn(model, batch).backward()
            simcuda.fail_in(-1)
            optimizer.step()
    assert relative_error(parameters(model), want) <= 1e-12
    in_a_pass = mode == "step" or allocation > 0  # (a script's first allocation is that of values that are compared later)
    assert [event.kind for event in run.events].count("out of memory") == in_a_pass


@MODES
@pytest.mark.parametrize("allocation", [0, 5, 20, 60, 130])
def test_an_allocation_that_fails_while_planning_is_survived(mode: str, allocation: int) -> None:
    batches = [points(64, seed=seed) for seed in range(2)]
    want, model = plainly(batches), net()
    simcuda.fail_in(allocation)
    trained(model, batches, mode, micro_batch=16)
    assert relative_error(parameters(model), want) <= 1e-12


def query_device(model: nn.Module) -> dict[str, Any]:
    gc.collect()
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "random": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],
        "device": torch.cuda.current_device(),
        "stream": torch.cuda.current_stream().stream_id,
        "gradients": [p.grad for p in model.parameters()],
    }


@MODES
@pytest.mark.parametrize("name", ["mlp", "lstm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "resnet"))])
def test_planning_leaves_no_trace_on_the_device(name: str, mode: str) -> None:
    family = FAMILIES[name]
    model = family.build(dropout=0.1).cuda()
    batch = moved(first_batch(family, 12), torch.device("cuda"))
    optimizer = AdamW(model.parameters())
    before, held = query_device(model), torch.cuda.memory_allocated()
    if mode == "step":
        samples = family.dataset(n=24)
        loader: Any = DataLoader(samples, batch_size=12, collate_fn=family.collate)
        run = memfit.wrap(model, optimizer, loader, loss_fn=family.loss, micro_batch=5)
    else:
        run = memfit.wrap(model, optimizer, micro_batch=5)
        out = family.logits(model, batch)  # learns, profiles, proves; runs nothing of the batch
        del out
    after = query_device(model)
    assert run.plan is not None or mode == "script"
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    assert torch.cuda.memory_allocated() - held <= 64 * 1024


@pytest.mark.parametrize("mode", ["script", "step"])
def test_evaluation_runs_in_pieces(mode: str) -> None:
    x = points(9000)[0]
    with torch.no_grad():
        want = net().eval()(x).cpu()
    torch.cuda.empty_cache()
    simcuda.set_capacity(100 * MiB)
    model = net()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1), **({"loss_fn": loss_fn} if mode == "step" else {}))
    model.eval()
    seen = Forwards(model[0])
    with torch.no_grad():
        out = model(x)
    assert len(seen.sizes) > 1 and sum(seen.sizes) == 9000 and out.is_cuda
    torch.testing.assert_close(out.cpu(), want)


def runs_by_hand(micro_batch: int, batch: tuple[Tensor, Tensor]) -> bool:
    """Whether a loop that accumulates has room for micro-batches of that size."""
    model = net(torch.float32)
    optimizer = AdamW(model.parameters())
    try:
        for _ in range(2):
            optimizer.zero_grad()
            for x, y in zip(*(each.split(micro_batch) for each in batch)):
                (F.cross_entropy(model(x.cuda()), y.cuda()) * len(x) / len(batch[0])).backward()
            optimizer.step()
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("capacity", [60, *(pytest.param(capacity, marks=pytest.mark.slow) for capacity in (28, 40, 100, 200))])
def test_what_is_admitted_is_near_what_a_loop_by_hand_has_room_for(capacity: int) -> None:
    batch = points(4096, "cpu", dtype=torch.float32)
    simcuda.set_capacity(capacity * MiB - margin_for("cuda", capacity * MiB))
    sizes = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    by_hand = max((size for size in sizes if runs_by_hand(size, batch)), default=0)
    assert by_hand > 0
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    gc.collect()
    torch.cuda.empty_cache()
    simcuda.set_capacity(capacity * MiB)
    model = net(torch.float32)
    loader: Any = DataLoader(TensorDataset(*batch), batch_size=4096)
    run = memfit.wrap(model, AdamW(model.parameters()), loader, loss_fn=on_the_device)
    for each in run.loader:
        run.step(each)
    core = run._core
    assert core is not None and core.in_force.active is not None and core.in_force.active.profile is not None
    profile, room = core.in_force.active.profile, core.memory.budget().room
    assert by_hand // 4 <= max(size for size in sizes if profile.peak(size).upper <= room) <= by_hand


def on_the_device(model: nn.Module, batch: Any) -> Tensor:
    return loss_fn(model, [each.cuda() for each in batch])


@pytest.mark.parametrize("mode", ["script", "step"])
@pytest.mark.slow
@pytest.mark.parametrize("how", ["others", "fraction"])
def test_less_memory_from_one_step_to_the_next_is_survived(how: str, mode: str) -> None:
    batches = [points(2048, "cpu", seed=seed) for seed in range(3)]
    want, model = plainly(batches), net()
    simcuda.set_capacity("2GiB")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    run = memfit.wrap(model, optimizer, **({"loss_fn": on_the_device} if mode == "step" else {}))
    for i, batch in enumerate(batches):
        if i == 2:
            torch.cuda.empty_cache()
            if how == "others":
                simcuda.set_others((2 << 30) - torch.cuda.memory_reserved() - 24 * MiB)
            else:
                torch.cuda.set_per_process_memory_fraction(0.04)
        if mode == "step":
            run.step(batch)
        else:
            optimizer.zero_grad()
            on_the_device(model, batch).backward()
            optimizer.step()
    assert relative_error(parameters(model), want) <= 1e-12


def waits(step: Callable[[], Any], times: int = 6) -> int:
    """The most often that the host waited in a step, once what is learned in the first ones is known."""
    found = []
    for _ in range(times):
        simcuda.reset_counters()
        step()
        found.append(simcuda.counters()["syncs"])
    return max(found[times // 2 :])


@MODES
def test_the_host_waits_no_oftener_than_without(mode: str) -> None:
    batch = points(64, dtype=torch.float32)
    model = net(torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, micro_batch=16, **({"loss_fn": loss_fn} if mode == "step" else {}))

    def script() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    assert waits(lambda: run.step(batch) if mode == "step" else script(), times=12) == 0


class Operations(TorchDispatchMode):
    """Counts operations: those that only make another view of a tensor, and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.views = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.views, self.kernels = self.views + aliases, self.kernels + (not aliases)
        return result


def test_a_step_dispatches_hardly_more_operations_than_a_loop_by_hand() -> None:
    """The parameters are compared with what they were once per step, and all at once."""
    batch = points(64, dtype=torch.float32)

    def operations(step: Callable[[SGD, nn.Module], None], wrap: bool) -> Operations:
        model = nn.Sequential(nn.Linear(16, 16), *(nn.Linear(16, 16) for _ in range(30)), nn.Linear(16, 4)).to("cuda")
        optimizer = SGD(model.parameters(), lr=0.1)
        if wrap:
            memfit.wrap(model, optimizer, micro_batch=16)
        for _ in range(12):  # what is learned in the first steps is known then
            with Operations() as found:
                step(optimizer, model)
        return found

    def by_hand(optimizer: SGD, model: nn.Module) -> None:
        optimizer.zero_grad()
        for x, y in zip(*(each.split(16) for each in batch)):
            (loss_fn(model, (x, y)) / 4).backward()
        optimizer.step()

    def script(optimizer: SGD, model: nn.Module) -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    ours, its = operations(script, True), operations(by_hand, False)
    parameters, micro_batches = 64, 4
    assert ours.kernels <= its.kernels + 4 * micro_batches + 36  # counts of labels, and what is compared
    assert ours.views <= its.views + 6 * parameters


class Masked(nn.Module):
    """Computes its loss: a mean by hand over what a mask leaves."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.net = net(device=device)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        each = (self.net(x)[:, 0] - y).square()
        return (each * mask).sum() / mask.sum()


def masks(*counts: int) -> Tensor:
    """One mask per sample; as many are set in each four samples."""
    return torch.tensor([float(i < count) for count in counts for i in range(4)], dtype=torch.float64)


@MODES
@pytest.mark.parametrize("later", [(4, 1, 3, 2), (4, 0, 3, 0)], ids=["uneven", "empty"])
@pytest.mark.parametrize("first", [(4, 4, 4, 4), (3, 1, 4, 2)], ids=["even", "told apart"])
def test_what_counts_is_looked_at_on_the_device(mode: str, first: tuple[int, ...], later: tuple[int, ...]) -> None:
    """No count was told from the samples at first; a micro-batch without any would be 0 / 0."""

    def gradients(device: str, wrap: bool) -> list[dict[str, Tensor | None]]:
        model = Masked(device)
        optimizer = SGD(model.parameters(), lr=0.0)
        given: dict[str, Any] = {"loss_fn": lambda m, batch: m(*batch)} if mode == "step" else {}
        run = memfit.wrap(model, optimizer, micro_batch=4, **given) if wrap else None
        found = []
        for seed, counts in enumerate((first, first, first, later, first, later)):
            batch = (*points(16, device, seed=seed), masks(*counts).to(device))
            optimizer.zero_grad()
            if run is not None and mode == "step":
                run.step(batch)
            else:
                model(*batch).backward()
                optimizer.step()
            found.append({name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()})
        return found

    for got, want in zip(gradients("cuda", True), gradients("cpu", False), strict=True):
        assert relative_error(got, want) <= 1e-12


def mean_over_mask(model: nn.Module, batch: Any) -> Tensor:
    x, y, mask = batch
    return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()


@pytest.mark.parametrize("weight", [None, lambda batch: batch[2].sum(), lambda batch: float(len(batch[0]))])
@pytest.mark.parametrize("there", [False, True], ids=["from the host", "on the device"])
def test_what_is_counted_is_read_once_a_step(weight: Any, there: bool) -> None:
    """And not at all where the host knows it; what an inferred weighting is held against, once at the end."""
    batch = [each.to("cuda" if there else "cpu") for each in (*points(16, "cpu"), masks(4, 2, 3, 4))]
    model = net()
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), loss_fn=mean_over_mask, micro_batch=4, weight=weight)
    known = there and (weight is None or isinstance(weight(batch), Tensor))
    assert waits(lambda: run.step(batch), times=12) == int(known) + int(weight is None)


@pytest.mark.parametrize("mode", ["off", "script", "step"])
def test_what_was_deleted_is_gone_when_the_next_model_is_wrapped(mode: str) -> None:
    """Until then a cycle keeps it, which Python collects some time."""
    gc.collect()
    data, held = TensorDataset(*points(64, "cpu")), torch.cuda.memory_allocated()

    def train() -> None:
        model = net()
        optimizer = AdamW(model.parameters())
        given: dict[str, Any] = {"loss_fn": loss_fn} if mode == "step" else {"enabled": mode != "off"}
        run = memfit.wrap(model, optimizer, DataLoader(data, batch_size=32), micro_batch=8, **given)
        for batch in run.loader:
            if mode == "step":
                run.step(batch)
            else:
                optimizer.zero_grad()
                loss_fn(run.model, [each.cuda() for each in batch]).backward()
                optimizer.step()

    gc.disable()
    try:
        train()
        other = nn.Linear(1, 1).cuda()
        run = memfit.wrap(other, SGD(other.parameters(), lr=0.1))
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        assert torch.cuda.memory_allocated() - held <= 2 * 512
        run.undo()
    finally:
        gc.enable()
        gc.collect()


def test_a_model_of_the_second_device_leaves_the_first_alone() -> None:
    model = net(device="cuda:1")
    batches = [points(64, "cuda:1", seed=seed) for seed in range(2)]
    want = plainly(batches)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    trained(model, batches, "step", micro_batch=16)
    assert relative_error(parameters(model), want) <= 1e-12
    assert torch.cuda.max_memory_allocated(0) == before
    assert copy.deepcopy(model)[0].weight.device.index == 1
