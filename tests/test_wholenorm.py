"""batchnorm="whole": running statistics of the whole effective batch, whatever its micro-batches are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Aside, points, unseen
from processes import Processes
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import memfit


def net(momentum: float | None = 0.1, *, twice: bool = False) -> nn.Module:
    """The statistics of its first norm do not depend on how samples were normalised."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(7, momentum=momentum)
    return nn.Sequential(norm, *([norm] if twice else []), nn.Linear(7, 4)).double()


def statistics(model: nn.Module) -> list[Tensor]:
    norm: Any = model[0]  # type: ignore[index]
    return [norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()]


def trained(model: nn.Module, batches: list[Any], loss: Any, **settings: Any) -> list[Tensor]:
    optimizer = SGD(model.parameters(), lr=0.0)
    if settings:
        memfit.wrap(model, optimizer, **settings)
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return statistics(model)


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("checkpoint", ["off", "all"])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda out, y: unseen(out).exp().mean()], ids=["accumulate", "replay"])
def test_running_statistics_are_those_of_the_whole_batch(loss: Any, checkpoint: str, momentum: float | None) -> None:
    batches = [points(seed=seed) for seed in range(4)]
    want = trained(net(momentum), batches, loss)
    model = net(momentum)
    found = trained(model, batches, loss, micro_batch=5, batchnorm="whole", checkpoint=checkpoint)
    for ours, theirs in zip(found, want):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert model[0].momentum == momentum  # type: ignore[index]
    without = trained(net(momentum), batches, loss, micro_batch=5)
    assert not torch.allclose(without[1], want[1], rtol=1e-3)


def test_a_norm_that_a_forward_calls_twice_is_updated_twice() -> None:
    batches = [points(seed=seed) for seed in range(3)]
    found = trained(net(twice=True), batches, F.cross_entropy, micro_batch=5, batchnorm="whole")
    assert int(found[2]) == 2 * len(batches)


def test_step_mode() -> None:
    batches = [points(seed=seed) for seed in range(3)]
    want = trained(net(), batches, F.cross_entropy)
    model = net()
    run = memfit.wrap(
        model, SGD(model.parameters(), lr=0.0), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), sample=batches[0],
        micro_batch=5, batchnorm="whole",
    )  # fmt: skip
    for batch in batches:
        run.step(batch)
    for ours, theirs in zip(statistics(model), want):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert any("running statistics are the whole batch's" in event.message for event in run.report().events)


def test_memory_that_runs_out_leaves_nothing_behind() -> None:
    batches, model = [points(seed=seed) for seed in range(3)], net()
    want = trained(copy.deepcopy(model), batches, F.cross_entropy)
    failing = iter([False, False, True])

    def fail(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and armed.value and next(failing, False):
            raise torch.OutOfMemoryError("out of memory")

    armed = Aside(value=False)
    model[1].register_forward_pre_hook(fail)  # type: ignore[index]
    optimizer = SGD(model.parameters(), lr=0.0)
    memfit.wrap(model, optimizer, micro_batch=5, batchnorm="whole")
    for number, (x, y) in enumerate(batches):
        armed.value = number == 1
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for ours, theirs in zip(statistics(model), want):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def over_ranks() -> list[Tensor]:
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(points(seed=seed) for seed in range(4)))))
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    run = memfit.wrap(model, optimizer, DataLoader(data, batch_size=13), micro_batch=2, target_batch=13, batchnorm="whole")
    for x, y in run.loader:  # (the last batch has 9)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    run.undo()
    return statistics(model)


def test_over_all_processes() -> None:
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(points(seed=seed) for seed in range(4)))))
    want = trained(net(), list(DataLoader(data, batch_size=13)), F.cross_entropy)
    two = Processes(2)
    try:
        for found in two.run(over_ranks):
            for ours, theirs in zip(found, want):
                assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    finally:
        two.end()
