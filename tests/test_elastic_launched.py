"""examples/06_elastic.py under a real torchrun: a process is killed, the parameters are the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "06_elastic.py"
STEPS = 320
PATIENCE = 120.0


class Launched:
    """The example, started; its processes are those that it started itself."""

    def __init__(self, folder: Path, *launcher: str, pause: str = "0") -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STATE": str(folder / "state.pt")}
        self.log = folder / f"log-{time.monotonic_ns()}.txt"
        with self.log.open("w") as output:
            launch = ("-m", "torch.distributed.run", *launcher) if launcher else ()
            command = [sys.executable, *launch, str(ROOT / "tests" / "slowed.py"), pause, str(EXAMPLE)]
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill(self) -> None:
        """The launcher and its workers, at once; workers are leaders of sessions of their own."""
        doomed = [self.process.pid, *self.workers()]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> str:
        assert self.process.wait(PATIENCE) == 0, self.text[-3000:]
        return self.text


@pytest.fixture
def started() -> Iterator[list[Launched]]:
    found: list[Launched] = []
    yield found
    for each in found:
        if each.process.poll() is None:
            each.kill()


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["run"]["steps"] if path.exists() else 0


def await_step(path: Path, step: int) -> None:
    until = time.monotonic() + PATIENCE
    while step_of(path) < step:
        assert time.monotonic() < until, f"still at step {step_of(path)}"
        time.sleep(0.02)


def parameters(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "state.pt", weights_only=True)["run"]
    assert state["steps"] == STEPS
    return torch.cat([value.flatten() for value in state["model"].values()]).double()


@pytest.fixture(scope="module")
def never_interrupted(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("alone")
    Launched(folder).end()
    return parameters(folder)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow
def test_a_worker_that_is_killed_is_restarted_and_the_run_ends_as_if_it_had_not_been(
    never_interrupted: torch.Tensor, started: list[Launched], tmp_path: Path
) -> None:
    started.append(Launched(tmp_path, "--standalone", "--nproc_per_node=2", "--max-restarts=3", pause="0.02"))
    await_step(tmp_path / "state.pt", 40)
    os.kill(started[0].workers()[-1], signal.SIGKILL)
    text = started[0].end()
    assert text.count("memfit: batch 64, of which 32") == 2, text[-3000:]  # rank 0 planned twice
    assert apart(parameters(tmp_path), never_interrupted) <= 1e-5
