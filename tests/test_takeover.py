"""Models that come in DistributedDataParallel or DataParallel: the wrapper goes on answering as what it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from test_ranks import TARGET, dataset, difference, loader_of, loss_fn, network, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import memfit


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


def joined() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def in_distributed(mode: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The parameters after two epochs of a script that was written for DistributedDataParallel, and what it still finds."""
    joined()
    model = DistributedDataParallel(network(), **options)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    source = loader_of("distributed")
    settings: dict[str, Any] = {}
    if mode == "step":
        settings["loss_fn"] = lambda model, batch: loss_fn(model, batch) + 0 * model.module[0].weight.sum()
    wrapped, optimizer, loader = run = memfit.wrap(
        model, optimizer, source, target_batch=TARGET, micro_batch=2, **settings
    )
    for epoch in range(2):
        source.sampler.set_epoch(epoch)
        for batch in loader:
            if mode == "step":
                run.step(batch)
            else:
                optimizer.zero_grad()
                loss_fn(wrapped, batch).backward()
                optimizer.step()
    seen = [wrapped is model, isinstance(wrapped, DistributedDataParallel), sorted(wrapped.state_dict())]
    without = {name.removeprefix("module."): value for name, value in wrapped.state_dict().items()}
    wrapped.load_state_dict(without)
    wrapped.load_state_dict(wrapped.state_dict())
    run.undo()
    assert "forward" not in vars(model)
    return {name: value.clone() for name, value in without.items()}, seen


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("mode", ["step", "script"])
def test_a_script_for_distributed_data_parallel_trains_as_one_process_would(
    mode: str, options: dict[str, Any], two: Processes
) -> None:
    want, _ = trained(mode, "distributed")
    for found, (same, is_one, keys) in two.run(in_distributed_with, mode, options):
        assert same and is_one and all(key.startswith("module.") for key in keys)
        assert difference(found, want) <= 1e-12


def in_distributed_with(mode: str, options: dict[str, Any]) -> Any:
    return in_distributed(mode, **options)


def summed(in_wrapper: bool, mode: str) -> float:
    """The gradient of a sum of squares over samples 0..3, two on each process; the only weight is 1."""
    joined()
    inner = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(inner.weight)
    model = DistributedDataParallel(inner) if in_wrapper else inner
    optimizer = SGD(model.parameters(), lr=0.0)
    rank = int(os.environ["RANK"])
    x = torch.tensor([[2.0 * rank], [2.0 * rank + 1]], dtype=torch.float64)

    def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), torch.zeros_like(x), reduction="sum")

    run = memfit.wrap(model, optimizer, micro_batch=1, **({"loss_fn": total} if mode == "step" else {}))
    if mode == "step":
        run.step(x)
    else:
        total(model, x).backward()
    run.undo()
    assert inner.weight.grad is not None
    return float(inner.weight.grad)


@pytest.mark.parametrize("mode", ["step", "script"])
@pytest.mark.parametrize(("in_wrapper", "want"), [(False, 28.0), (True, 14.0)])
def test_a_sum_is_that_over_all_processes_or_their_mean_as_the_wrapper_makes_it(
    in_wrapper: bool, want: float, mode: str, two: Processes
) -> None:
    assert two.run(summed, in_wrapper, mode) == [want, want]


def refused(how: str) -> str:
    joined()
    model: nn.Module = network(nn.SyncBatchNorm(16)) if how == "norm" else DistributedDataParallel(network())
    if how == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)  # pyright: ignore[reportCallIssue]
    optimizer = SGD(model.parameters(), lr=0.1)
    try:
        run = memfit.wrap(model, optimizer, loader_of("distributed"), target_batch=TARGET, micro_batch=2)
        batch = next(iter(run.loader))
        with model.no_sync():  # pyright: ignore[reportCallIssue]
            loss_fn(model, batch).backward()
    except memfit.Refused as error:
        return str(error)
    finally:
        vars(model).pop("forward", None)
    return "not refused"


@pytest.mark.parametrize(
    ("how", "words"),
    [("hook", "allreduce_hook would not be called"), ("norm", "SyncBatchNorm (2)"), ("no_sync", "inside no_sync()")],
)
def test_what_cannot_be_taken_over_is_refused_by_name(how: str, words: str, two: Processes) -> None:
    for text in two.run(refused, how):
        assert words in text


def test_data_parallel_over_one_device_is_the_module_inside() -> None:
    want, _ = trained("script", "in order", epochs=1)
    torch.manual_seed(0)
    model = nn.DataParallel(network())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, loader = memfit.wrap(model, optimizer, loader_of("in order"), target_batch=TARGET, micro_batch=2)
    for batch in loader:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    assert isinstance(model, nn.DataParallel)
    assert difference({name.removeprefix("module."): value for name, value in model.state_dict().items()}, want) <= 1e-12
    assert len(dataset()) > TARGET  # type: ignore[arg-type]


def test_data_parallel_over_several_devices_is_refused_with_the_command_to_type() -> None:
    model = nn.DataParallel(network())
    model.device_ids = [0, 1, 2]
    with pytest.raises(memfit.Refused, match="torchrun --nproc_per_node=3"):
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), target_batch=12)
