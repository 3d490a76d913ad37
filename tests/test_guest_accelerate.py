"""accelerate, launched as its users launch it: the loop of its documentation, on one process and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate")
from accelerated import parts

ROOT = Path(__file__).resolve().parent.parent
FIGURES = {"memfit/peak_predicted", "memfit/peak_measured", "memfit/samples_per_second", "memfit/micro_batch", "memfit/step"}


def launched(folder: Path, how: str, processes: int, *options: str) -> dict[str, Any]:
    """What the script found, started by `accelerate launch`."""
    path = folder / f"{how}-{processes}.json"
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    launcher += ["--num_processes", str(processes), "--num_machines", "1", "--dynamo_backend", "no"]
    options = options or ("--mixed_precision", "no")
    if processes == 1:
        launcher += ["--cpu", *options]
    else:  # without GPUs it starts several processes where it is told that there are some, and the script that there are none
        launcher += ["--main_process_port", "0", *(() if "--use_fsdp" in options else ("--multi_gpu",)), *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    command = [*launcher, str(ROOT / "tests" / "accelerated.py"), how, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


def by_hand(batch: int) -> list[list[float]]:
    """The same training in plain PyTorch."""
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for _ in range(2):
        pieces = list(loader)
        xs, ys = (torch.cat([piece[i] for piece in pieces]) for i in (0, 1))
        for x, y in zip(xs.split(batch), ys.split(batch)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("how", ["target", "accumulating"])
def test_the_loop_of_its_documentation_trains_as_one_process_would(how: str, processes: int, tmp_path: Path) -> None:
    batch = 16 if how == "target" else 8 * processes
    found = launched(tmp_path, how, processes)
    assert found["processes"] == processes and found["micro_batch"] == 3 and found["type"] == "Sequential"
    assert found["steps"] == 2 * -(-52 // batch) and found["synced"] and found["given_back"]
    assert found["script_batch"] == (4 if how == "target" else 8) * processes
    assert found["another_batch"] == (how == "target")  # 8 x the processes is what was asked of accelerate itself
    assert found["rate"] == pytest.approx(0.1 * 0.9 ** found["steps"])  # one step of the schedule per optimizer step
    for got, want in zip(found["parameters"], by_hand(batch), strict=True):
        assert got == pytest.approx(want, abs=1e-6)
    assert set(found["logged"]) >= FIGURES | {"loss"}


@pytest.mark.slow
def test_mixed_precision_is_accelerates_own(tmp_path: Path) -> None:
    found = launched(tmp_path, "target", 1, "--mixed_precision", "bf16")
    errors = [abs(a - b) for got, want in zip(found["parameters"], by_hand(16)) for a, b in zip(got, want)]
    assert 1e-6 < max(errors) < 0.05  # its autocast rounds, and the gradients are still those


@pytest.mark.slow
def test_what_shards_the_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"training with FSDP through memfit\.integrations"):
        launched(tmp_path, "target", 2, "--mixed_precision", "no", "--use_fsdp")
