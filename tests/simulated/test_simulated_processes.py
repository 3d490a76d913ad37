"""Two processes under torchrun, each on a simulated device of its own: `init_process_group("nccl")` works unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_script import data, net
from launchers import ROOT, started, torchrun

SCRIPT = str(Path(__file__).parent / "distributed_script.py")


def found(processes: int) -> dict[str, Any]:
    """What the script says on so many processes, in which the device is there as it is here."""
    paths = os.pathsep.join((os.environ["PYTHONPATH"], str(ROOT)))
    said = started(torchrun(SCRIPT, processes=processes), PYTHONPATH=paths)[0]
    return json.loads(next(line for line in said.splitlines() if line.startswith("{")))


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return found(2)


def test_collectives_over_the_devices_tensors(two: dict[str, Any]) -> None:
    assert two["collectives"] == [[3, 3], [1, 1, 2, 2], [1, 1], [0]]


def test_distributed_data_parallel_has_the_mean_gradient(two: dict[str, Any]) -> None:
    model, (x, y) = net(), data()[:8]
    F.cross_entropy(model(x.cuda()), y.cuda()).backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(torch.tensor(two["gradient"], dtype=torch.float64), want.cpu(), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_memfit_ends_with_the_parameters_of_one_process(two: dict[str, Any]) -> None:
    one = found(1)
    torch.testing.assert_close(torch.tensor(two["parameters"]), torch.tensor(one["parameters"]), rtol=1e-12, atol=1e-14)
