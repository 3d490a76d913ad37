"""What the benchmarks share: families to run, children under a real memory limit, tables, dated JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

MiB = 2**20
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives freed memory back at once: what a prediction can be judged by."""
CGROUPS = Path("/sys/fs/cgroup/memory")
FAMILIES = ("gpt", "bert", "vit", "t5", "resnet", "convnext", "unet", "lstm")
CORRECTED = ("lstm", "resnet", "convnext", "unet", "superres")
"""Families whose kernels take scratch memory that tensors do not show; measured while planning, not predicted."""


def environment(pinned: bool = False) -> dict[str, str]:
    """That of a fresh process which imports memfit from here, as compiled as an installed package is."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    places = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]  # (tests/simcuda adds one)
    return {**kept, **(PINNED if pinned else {}), "PYTHONPATH": os.pathsep.join(places)}


def child(script: str, arguments: Sequence[str], *, pinned: bool, timeout: float = 900.0) -> dict[str, Any]:
    """Run one of our scripts in a fresh process; its last line of output is JSON. A death is a result, too."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, env=environment(pinned), capture_output=True, text=True, timeout=timeout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or [""]
        named = (line for line in reversed(said) if re.match(r"[\w.]+(Error|Exception|Refused|DoesNotFit)\b", line))
        error = next(named, said[-1])
        return {"died": done.returncode or -1, "error": error[:300], "end": said[-12:]}
    return json.loads(lines[-1])


def status() -> dict[str, int]:
    """The kernel's figures for this process, in bytes."""
    wanted = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmData")
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in wanted:
            found[name] = int(rest.split()[0]) * 1024
    return found


def reset_peak() -> None:
    """Let VmHWM begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def anonymous_peak() -> int:
    """Most anonymous memory since `reset_peak`."""
    now = status()
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"]


def limit_data(room: int) -> int:
    """Let this process's private memory grow by `room` bytes at most, really; returns the limit."""
    import resource

    limit = status()["VmData"] + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def own_cgroup() -> Path:
    """A memory cgroup (version 1) that this process is in from now on; empty ones of processes that ended are removed."""
    for old in CGROUPS.glob("memfit-*"):
        with contextlib.suppress(OSError):
            old.rmdir()
    group = CGROUPS / f"memfit-{os.getpid()}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return group


def limit_cgroup(group: Path, room: int) -> int:
    """Let what is charged to a cgroup grow by `room` bytes at most, really; returns the limit."""
    limit = int((group / "memory.usage_in_bytes").read_text()) + room
    (group / "memory.limit_in_bytes").write_text(str(limit))
    return limit


def reset_charged(group: Path) -> int:
    """Let `most_charged` begin again; returns what is charged to the cgroup now, in bytes."""
    (group / "memory.max_usage_in_bytes").write_text("0")
    return int((group / "memory.usage_in_bytes").read_text())


def most_charged(group: Path) -> int:
    """Most bytes charged to a cgroup since `reset_charged`."""
    return int((group / "memory.max_usage_in_bytes").read_text())


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as aligned text."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])


def save(name: str, content: dict[str, Any]) -> Path:
    """Write a dated result."""
    import torch

    RESULTS.mkdir(parents=True, exist_ok=True)
    path = _path_of_today(name)
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "libc": " ".join(platform.libc_ver()),
    }
    path.write_text(json.dumps({"machine": machine, **content}, indent=1) + "\n")
    return path


def result_of_today(name: str) -> dict[str, Any]:
    """What `save` wrote today, or nothing."""
    path = _path_of_today(name)
    return json.loads(path.read_text()) if path.exists() else {}


def _path_of_today(name: str) -> Path:
    return RESULTS / f"{name}-{date.today().isoformat()}.json"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
