"""Where reserved memory is limited: what is reserved after the plan was made is followed by smaller micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import memfit
from memfit.autotune.memory import Memory

ROOT = Path(__file__).resolve().parent.parent
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
TRAINED = """
import json, mmap, resource, sys, time
import torch
from torch import nn
import memfit
from memfit.hardware.limits import read_status

MIB, share, settings = 2**20, float(sys.argv[1]), json.loads(sys.argv[2])
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))  # keeps 2 MiB per sample of [256, 256]
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.rand(64, 256, 256)
def loss_fn(model, batch):
    time.sleep(0.01)  # on whatever machine, more samples at once are faster
    return model(batch).pow(2).mean()

loss_fn(model, batch[:1]).backward()  # threads and kernels are there
size = read_status()["VmData"] + 160 * MIB
resource.setrlimit(resource.RLIMIT_DATA, (size, size))
run = memfit.wrap(model, optimizer, loss_fn=loss_fn, sample=batch, **settings)
losses = [float(run.step(batch)) for _ in range(12)]
planned = run.plan
left = planned.margin // 2 + int(share * planned.predicted.upper)
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # reserved, as kernels reserve: never touched
kept = mmap.mmap(-1, max(1, planned.limit - planned.held - left), flags=private)
losses += [float(run.step(batch)) for _ in range(4)]
print(json.dumps({
    "before": planned.micro_batch, "after": run.plan.micro_batch, "losses": losses,
    "kinds": [e.kind for e in run.events], "messages": [e.message for e in run.events],
}))
"""


def trained(share: float, **settings: Any) -> dict[str, Any]:
    """12 steps under a real limit on reserved memory, then 4 in `share` of the room they need, as the rest was reserved."""
    command = [sys.executable, "-W", "ignore", "-c", TRAINED, str(share), json.dumps(settings)]
    environment = {**os.environ, **PINNED, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private mappings on Linux")
def test_micro_batches_make_room_for_what_is_reserved_later() -> None:
    found = trained(0.6)
    assert found["after"] < found["before"]
    assert "out of memory" not in found["kinds"]
    assert any("more are reserved than when the plan was made" in message for message in found["messages"])
    assert all(late < early for early, late in zip(found["losses"], found["losses"][1:]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private mappings on Linux")
def test_micro_batches_stay_where_little_is_reserved_later() -> None:
    found = trained(3.0)
    assert found["after"] == found["before"] and "out of memory" not in found["kinds"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private mappings on Linux")
def test_a_prescribed_micro_batch_stays_as_it_was_asked_for() -> None:
    found = trained(0.9, micro_batch=8)
    assert (found["before"], found["after"]) == (8, 8)
    assert not any("more are reserved" in message for message in found["messages"])


SHAPES = """
import json, resource
import torch
from torch import nn
import memfit
from memfit.hardware.limits import read_status

model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(12)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def loss_fn(model, batch):
    return model(batch).pow(2).mean()

loss_fn(model, torch.rand(2, 8, 16)).backward()
size = read_status()["VmData"] + 100 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (size, size))
run = memfit.wrap(model, optimizer, loss_fn=loss_fn, sample=torch.rand(8, 400, 16), micro_batch="auto")
losses = [float(run.step(torch.rand(8, length, 16))) for length in range(400, 280, -1)]
print(json.dumps({"losses": losses, "kinds": [e.kind for e in run.events], "messages": [e.message for e in run.events]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private mappings on Linux")
def test_kernels_for_ever_new_shapes_do_not_fill_what_is_reserved() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SHAPES]
    environment = {**os.environ, **PINNED, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["losses"]) == 120 and "out of memory" not in found["kinds"]
    assert any("run without oneDNN" in message for message in found["messages"])


@pytest.mark.parametrize(("model", "stops"), [(nn.Linear(2, 2), True), (nn.Sequential(nn.Conv1d(2, 2, 3)), False)])
def test_only_models_without_convolutions_run_without_onednn(model: nn.Module, stops: bool) -> None:
    memory = Memory(model, SGD(model.parameters(), lr=0.1), torch.device("cpu"), memfit.probe())
    assert memory.stop_new_kernels() is stops and not memory.stop_new_kernels()
    before = torch._C._get_mkldnn_enabled()
    with memory.running():
        assert torch._C._get_mkldnn_enabled() is (before and not stops)
    assert torch._C._get_mkldnn_enabled() is before
