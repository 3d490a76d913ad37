"""Commands as users type them, in processes of their own: launchers, scripts, notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from processes import free_port

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 240
TORCHRUN = ("-m", "torch.distributed.run")
ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch")


def started(*commands: Sequence[str], **environment: str) -> list[str]:
    """What each command printed, all running at once; arguments are those of this Python. Raises AssertionError with stderr."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    there = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryDirectory() as folder:
        running = [_start(command, there, Path(folder) / str(i)) for i, command in enumerate(commands)]
        try:
            codes = [process.wait(PATIENCE) for process in running]
        finally:
            for process in running:
                process.kill()
        outputs = [(Path(folder) / f"{i}.out").read_text() for i in range(len(commands))]
        errors = [(Path(folder) / f"{i}.err").read_text() for i in range(len(commands))]
    assert not any(codes), "\n".join(error[-3000:] for error in errors)
    return outputs


def torchrun(script: str, *arguments: str, processes: int = 2) -> tuple[str, ...]:
    """The command for several processes on this machine."""
    return (*TORCHRUN, "--standalone", f"--nproc_per_node={processes}", script, *arguments)


def port() -> str:
    """One that nobody listens on."""
    return str(free_port())


def _start(command: Sequence[str], environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    with open(f"{output}.out", "wb") as out, open(f"{output}.err", "wb") as err:
        return subprocess.Popen([sys.executable, *command], stdout=out, stderr=err, env=environment, cwd=ROOT)
