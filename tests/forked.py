"""Runs scripts, each in a fork of one process that has imported what they share, which takes longer than they do.

A fork begins as `python script.py` does: arguments, environment, folder, `__main__`, and an exit with all that runs there.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = ("numpy", "sklearn.datasets", "torch", "torch._dynamo", "torch.distributed.tensor", "torch.utils.data")


def run(
    command: Sequence[str], *, folder: Path, environments: Sequence[Mapping[str, str]] = ({},), patience: int = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script in this folder, once for each of these additions to the environment at the same time. What they printed
    comes together; the code is that of the first that failed, or 0. The others of one that failed are stopped, and all after
    `patience` seconds."""
    each = [dict(environment) for environment in environments]
    asked = {"command": [*command], "folder": str(folder), "environments": each, "patience": patience}
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    code = json.loads(server.stdout.readline())
    out, err = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(command, code, out, err)


@cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).resolve())]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.communicate)  # it ends at the end of its input
    return server


def _serve() -> dict[str, Any] | None:
    """Fork for each request on standard input. Returns, in a fork, what to run, and in the server, at its end, None."""
    for name in IMPORTED:
        __import__(name)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        for name in ("stdout", "stderr"):
            Path(asked["folder"], name).unlink(missing_ok=True)
        started = []
        for environment in asked["environments"]:
            child = os.fork()
            if not child:
                return {**asked, "environment": environment}
            started.append(child)
        sys.stdout.write(json.dumps(_code_of(started)) + "\n")
        sys.stdout.flush()
    return None


def _code_of(children: Sequence[int]) -> int:
    running, failed = {*children}, 0
    while running:
        child, status = os.waitpid(-1, 0)
        running.discard(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failed


def _become(asked: dict[str, Any]) -> None:
    signal.alarm(asked["patience"])
    os.chdir(asked["folder"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(asked["environment"])
    sys.argv = asked["command"]
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    if (found := _serve()) is not None:
        _become(found)
