"""accelerate's save_state and load_state: a run goes on in the middle of an epoch, on another number of processes."""

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


def launched(folder: Path, stop: int, micro_batch: int, how: str, processes: int) -> dict[str, Any]:
    """What the script left, started by `accelerate launch`."""
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--mixed_precision", "no"]
    launcher += ["--num_processes", str(processes), "--num_machines", "1", "--dynamo_backend", "no"]
    launcher += ["--cpu"] if processes == 1 else ["--main_process_port", "0", "--multi_gpu"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    command = [*launcher, str(ROOT / "tests" / "accelerated_state.py"), str(folder), str(stop), str(micro_batch), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def by_hand(steps: int) -> list[list[float]]:
    """The same training in plain PyTorch, never interrupted."""
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    done = 0
    while True:
        pieces = list(loader)
        xs, ys = (torch.cat([piece[i] for piece in pieces]) for i in (0, 1))
        for x, y in zip(xs.split(16), ys.split(16)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            done += 1
            if done == steps:
                return [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["going on", "skipping"])
def test_a_saved_state_goes_on_with_the_rest_of_its_epoch(how: str, tmp_path: Path) -> None:
    """Four steps are an epoch. Scripts that skip what was done skip it once."""
    for stop, micro_batch, processes in ((2, 3, 1), (7, 4, 2), (13, 5, 1)):
        found = launched(tmp_path, stop, micro_batch, how, processes)
    assert "memfit_run.bin" in found["files"]
    for got, want in zip(found["parameters"], by_hand(13), strict=True):
        assert got == pytest.approx(want, abs=1e-6)


@pytest.mark.slow
def test_the_state_of_another_training_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    launched(tmp_path, 2, 3, "going on", 1)
    path = tmp_path / "state" / "memfit_run.bin"
    place = torch.load(path, weights_only=True)
    torch.save({**place, "target_batch": 8}, path)
    (tmp_path / "state" / "model.safetensors").unlink()
    launched(tmp_path, 4, 3, "going on", 1)
    assert "it was saved with target_batch=8" in (tmp_path / "error").read_text()


@pytest.mark.slow
def test_a_folder_without_a_place_is_loaded_and_its_script_may_skip(tmp_path: Path) -> None:
    """As accelerate saved it without memfit: skipping is the script's to do."""
    launched(tmp_path, 2, 3, "skipping", 1)
    (tmp_path / "state" / "memfit_run.bin").unlink()
    found = launched(tmp_path, 4, 3, "skipping", 1)
    assert found["steps"] == 4
