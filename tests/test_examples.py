"""The examples run as they stand, and the first one really is one line."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def test_the_first_example_differs_by_the_import_and_one_line() -> None:
    before, after = ((EXAMPLES / "01_one_line" / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    changed = [line for line in difflib.ndiff(before, after) if line[:1] in "+-"]
    assert len(changed) == 2 and all(line.startswith("+ ") for line in changed)
    assert changed[0] == "+ import memfit"
    assert changed[1].startswith("+ model, optimizer, loader = memfit.wrap(model, optimizer, loader")


@pytest.mark.slow
def test_the_first_example_prints_the_same_losses() -> None:
    before, after = (losses(run(f"01_one_line/{name}.py")) for name in ("before", "after"))
    assert len(before) == len(after) > 2
    assert after == pytest.approx(before, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["02_own_step.py", "03_plan_by_hand.py"])
def test_the_others_run_and_verify(name: str) -> None:
    printed = run(name)
    found = losses(printed)
    assert len(found) > 2
    if name == "02_own_step.py":  # the other one learns from noise
        assert found[-1] < found[0]
    assert "gradient equals the whole batch's to" in printed


@pytest.mark.slow
def test_one_process_and_two_print_the_same_losses() -> None:
    alone = losses(run("04_torchrun.py"))
    assert len(alone) == 12 and alone[-1] < alone[0]
    assert losses(run("04_torchrun.py", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")) == pytest.approx(
        alone, abs=2e-4
    )


def run(name: str, *launcher: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(line.split()[1]) for line in printed.splitlines() if line.startswith("loss ")]
