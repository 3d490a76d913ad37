"""The command that runs a script with a simulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import sys, torch
x = torch.ones(1000, 1000, device="cuda:1", requires_grad=True)
(x @ x).sum().backward()
print(torch.cuda.device_count(), torch.cuda.get_device_name(), torch.cuda.mem_get_info(), sys.argv[1:])
"""


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as from a shell, in whose environment there is no device yet."""
    environ = {name: value for name, value in os.environ.items() if name != "SIMCUDA"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.simcuda", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False, cwd=ROOT)


def test_a_script_runs_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    asked = ("--capacity", "100MiB,300MiB", "--others", "30MiB", "--context", "20MiB", "--name", "A card")
    done = launched(*asked, str(script), "--epochs", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == f"2 A card ({50 << 20}, {100 << 20}) ['--epochs', '1']"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "a script, or -m and a module"),
        (("--capacity", "1GiB,2GiB", "--devices", "3", "x.py"), "2 capacities for 3 devices"),
        (("--capacity", "much", "x.py"), "is no size"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = launched(*arguments)
    assert done.returncode != 0 and said in done.stderr
