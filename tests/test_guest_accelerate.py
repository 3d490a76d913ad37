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
from torch.utils.data import DataLoader

import memfit

pytest.importorskip("accelerate")
from accelerate.utils import DataLoaderConfiguration
from accelerated import CHECKS, parts

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


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("how", ["target", pytest.param("accumulating", marks=pytest.mark.slow)])
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


@pytest.fixture(scope="module", params=[1, 2])
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each check, on one process and on two."""
    return launched(tmp_path_factory.mktemp("checks"), "checks", request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_what_a_script_may_ask_of_an_accelerator(name: str, checks: dict[str, str]) -> None:
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    assert not checks[name], checks[name]


def test_loaders_that_cannot_be_served_are_refused_by_name() -> None:
    from memfit.integrations.loaders import RankPlace, as_configured

    loader, settings = parts()[1], DataLoaderConfiguration()
    assert as_configured(loader, settings, RankPlace(0, 2)) is loader
    settings.use_stateful_dataloader = True
    with pytest.raises(memfit.Refused, match="use_stateful_dataloader=True"):
        as_configured(loader, settings, RankPlace(0, 1))
    settings = DataLoaderConfiguration(dispatch_batches=True)
    assert as_configured(loader, settings, RankPlace(0, 1)) is loader
    with pytest.raises(memfit.Refused, match="dispatch_batches=True over 2 processes"):
        as_configured(loader, settings, RankPlace(0, 2))
    unsized = DataLoader(loader.dataset, batch_sampler=[[0, 1], [2, 3]])  # type: ignore[arg-type]
    with pytest.raises(memfit.Refused, match="with a list over 2 processes"):
        as_configured(unsized, DataLoaderConfiguration(), RankPlace(0, 2))


class Logged:
    """A tracker that keeps what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.told.append((step, values))


def test_trackers_are_told_as_training_goes_where_steps_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of devices only on a machine that has them; others are not told anything on memfit's own account."""
    from memfit.integrations.trackers import Follower

    model, loader = parts()
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, micro_batch=2)
    board, wandb = Logged("tensorboard"), Logged("wandb")
    follower = Follower(run, [board, wandb], 2)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        run.optimizer.step()
    follower.log()
    follower.end()
    assert [step for step, _ in board.told] == [*range(1, 11), 13] and not wandb.told
    assert all("memfit/plan" not in values for _, values in board.told[1:])  # as text, once
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40 + device)
    figures = follower.figures(wandb)
    assert "memfit/plan" in figures and {k: v for k, v in figures.items() if "rank" in k} == {
        "memfit/utilisation_rank0": 40,
        "memfit/utilisation_rank1": 41,
    }
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 1 / 0)
    assert not any("utilisation" in name for name in follower.figures(Logged("own")))
    assert not any(isinstance(value, str) for value in follower.figures(Logged("own")).values())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_mixed_precision_is_accelerates_own(processes: int, tmp_path: Path) -> None:
    found = launched(tmp_path, "target", processes, "--mixed_precision", "bf16")
    errors = [abs(a - b) for got, want in zip(found["parameters"], by_hand(16)) for a, b in zip(got, want)]
    assert 1e-6 < max(errors) < 0.05  # its autocast rounds, and the gradients are still those


@pytest.mark.slow
def test_what_shards_the_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"training with FSDP through memfit\.integrations"):
        launched(tmp_path, "target", 2, "--mixed_precision", "no", "--use_fsdp")
