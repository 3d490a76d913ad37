"""Finds what limits this process's host memory: cgroups and all their ancestors, rlimits, the machine itself.

Not covered: swap (training that swaps has already failed), limits per user or per NUMA node, Windows job objects. The readers
for Windows and macOS are tested with hand-made handles only.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import resource as _resource
except ImportError:  # Windows
    _resource = None


@dataclass(frozen=True)
class Limit:
    """One limit on memory, and how much is left below it."""

    name: str
    """What sets the limit, in words to look it up ("cgroup v2 memory.max of /a/b")."""
    left: int
    """Bytes this process can still get before it reaches the limit."""
    total: int
    """Bytes the limit allows in total, to everything it applies to."""


def host_limits(
    proc: str = "/proc", cgroup: str = "/sys/fs/cgroup", resource_module: Any = _resource
) -> tuple[Limit, ...]:
    """Return every limit on this process's host memory, tightest first."""
    found = cgroup_limits(proc, cgroup) + rlimits(proc, resource_module) + physical(proc)
    return tuple(sorted(found, key=lambda limit: limit.left))


def read_status(proc: str = "/proc") -> dict[str, int]:
    """Return the sizes in `<proc>/self/status` in bytes ("VmSize", "RssAnon", ...); empty if there is no such file."""
    return _sizes(f"{proc}/self/status")


# ---- rlimits


def rlimits(proc: str = "/proc", resource_module: Any = _resource) -> tuple[Limit, ...]:
    """Return RLIMIT_AS compared with VmSize and RLIMIT_DATA with VmData, where they are set and the kernel keeps count."""
    status = read_status(proc)
    found = []
    for name, counted in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        soft = _soft(name, resource_module)
        if soft is not None and counted in status:
            found.append(Limit(name, max(0, soft - status[counted]), soft))
    return tuple(found)


def is_set(name: str, resource_module: Any = _resource) -> bool:
    """Whether this rlimit ("RLIMIT_AS", ...) exists here and limits the process."""
    return _soft(name, resource_module) is not None


def _soft(name: str, resource_module: Any) -> int | None:
    number = getattr(resource_module, name, None)
    if number is None:
        return None
    soft, _ = resource_module.getrlimit(number)
    return soft if 0 <= soft != resource_module.RLIM_INFINITY else None


# ---- the machine


def physical(proc: str = "/proc") -> tuple[Limit, ...]:
    """Return the machine's own memory; empty if neither the kernel nor the standard library reports it."""
    meminfo = _sizes(f"{proc}/meminfo")
    if "MemTotal" in meminfo and "MemAvailable" in meminfo:
        return (Limit("physical memory", meminfo["MemAvailable"], meminfo["MemTotal"]),)
    if sys.platform == "win32":
        return windows_memory(ctypes.WinDLL("kernel32"))
    if sys.platform == "darwin":
        return mac_memory(_vm_stat(), _sysconf("SC_PHYS_PAGES") * _sysconf("SC_PAGE_SIZE"))
    left, total = (_sysconf(pages) * _sysconf("SC_PAGE_SIZE") for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return (Limit("physical memory", left, total),) if total else ()


class _MemoryStatusEx(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64)
        for name in (
            "phys_total",
            "phys_left",
            "commit_total",
            "commit_left",
            "virtual_total",
            "virtual_left",
            "extended",
        )
    ]


def windows_memory(kernel32: Any) -> tuple[Limit, ...]:
    """Return what GlobalMemoryStatusEx of `kernel32` reports: physical memory, and what Windows can still commit."""
    status = _MemoryStatusEx(length=ctypes.sizeof(_MemoryStatusEx))
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return ()
    return (
        Limit("physical memory", status.phys_left, status.phys_total),
        Limit("Windows commit limit", status.commit_left, status.commit_total),
    )


def mac_memory(vm_stat: str, total: int) -> tuple[Limit, ...]:
    """Return a Mac's memory, from the output of `vm_stat` and its size in bytes."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = [re.search(rf"Pages {kind}:\s+(\d+)", vm_stat) for kind in ("free", "speculative", "inactive")]
    if page is None or not total:
        return ()
    left = sum(int(count[1]) for count in pages if count) * int(page[1])
    return (Limit("physical memory", left, total),)


def _vm_stat() -> str:
    import subprocess

    try:
        return subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _sysconf(name: str) -> int:
    try:
        return max(0, os.sysconf(name))
    except (AttributeError, ValueError, OSError):
        return 0


# ---- cgroups


@dataclass(frozen=True)
class _Version:
    """The file names of one cgroup version."""

    label: str
    """The version's name, as limits show it."""
    bounds: tuple[str, ...]
    """Files that hold a limit in bytes."""
    usage: str
    """File with the bytes in use, including file cache."""
    cache: str
    """Line of memory.stat with the file cache that the kernel drops before it kills a process."""


# memory.high does not kill, but counts: beyond it the kernel slows a process without swap to a standstill.
_V2 = _Version("cgroup v2", ("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Version("cgroup v1", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")

_Mount = tuple[_Version, str, Path]  # version, the cgroup at the mount's root, the mount point


def cgroup_limits(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> tuple[Limit, ...]:
    """Return the limits of this process's memory cgroups and of all their visible ancestors."""
    mounts = list(_mounts(proc, Path(cgroup)))
    found = []
    for version, path in _memberships(proc):
        for directory, shown in _ancestry(version, path, mounts):
            found += _bounds(version, directory, shown)
    return tuple(found)


def _memberships(proc: str) -> Iterator[tuple[_Version, str]]:
    """Yield the version and path of each cgroup that may count this process's memory."""
    for line in _lines(f"{proc}/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _mounts(proc: str, cgroup: Path) -> Iterator[_Mount]:
    """Yield the cgroup mounts in mountinfo, and the usual places for a version it does not list."""
    told = list(_told_mounts(proc, cgroup))
    usual = ((_V2, "/", cgroup), (_V2, "/", cgroup / "unified"), (_V1, "/", cgroup / "memory"))
    yield from told
    yield from (mount for mount in usual if all(mount[0] is not known for known, _, _ in told))


def _told_mounts(proc: str, cgroup: Path) -> Iterator[_Mount]:
    for line in _lines(f"{proc}/self/mountinfo"):
        left, _, right = line.partition(" - ")
        where, what = left.split(" "), right.split(" ")
        if len(where) < 5 or len(what) < 3:
            continue
        if what[0] == "cgroup2":
            yield _V2, _unescaped(where[3]), _moved(_unescaped(where[4]), cgroup)
        elif what[0] == "cgroup" and "memory" in what[2].split(","):
            yield _V1, _unescaped(where[3]), _moved(_unescaped(where[4]), cgroup)


def _ancestry(version: _Version, path: str, mounts: list[_Mount]) -> Iterator[tuple[Path, str]]:
    """Yield the directory of the cgroup `path`, then of each ancestor, with its name below the mount."""
    seen = [(root, point) for kind, root, point in mounts if kind is version and os.path.isdir(point)]
    if not seen:
        return
    # Prefer the mount that shows the most ancestors. A mount that does not show the process at all comes last.
    root, point = min(seen, key=lambda mount: (_below(path, mount[0]) is None, len(mount[0])))
    below = _below(path, root)
    parts = _existing(point, _parts(path) if below is None else below)
    for depth in range(len(parts), -1, -1):
        directory = point.joinpath(*parts[:depth])
        if depth < len(parts) and version is _V1 and _number(directory / "memory.use_hierarchy") == 0:
            return  # such a parent does not count its children's memory
        yield directory, "/" + "/".join(parts[:depth])


def _below(path: str, root: str) -> list[str] | None:
    """Return the steps from the cgroup `root` down to `path`; None if it is not below (seen from another namespace)."""
    steps, top = _parts(path), _parts(root)
    rest = steps[len(top) :]
    return rest if steps[: len(top)] == top and ".." not in rest else None


def _existing(point: Path, parts: list[str]) -> list[str]:
    """Return the longest suffix of `parts` that is a directory under `point`: a container may see only its own part."""
    if ".." in parts:
        return []
    ends = (parts[start:] for start in range(len(parts)))
    return next((end for end in ends if os.path.isdir(point.joinpath(*end))), [])


def _bounds(version: _Version, directory: Path, shown: str) -> Iterator[Limit]:
    for file in version.bounds:
        total = _number(directory / file)
        if total is None or total >= 2**62:  # v1 writes "no limit" as the largest multiple of a page
            continue
        cache = _stat(directory / "memory.stat", version.cache)
        used = max(0, (_number(directory / version.usage) or 0) - cache)
        yield Limit(f"{version.label} {file} of {shown}", max(0, total - used), total)


def _stat(file: Path, key: str) -> int:
    values = (line.split() for line in _lines(file) if line.startswith(f"{key} "))
    return next((int(words[1]) for words in values if len(words) == 2 and words[1].isdecimal()), 0)


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


# ---- small readers


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _moved(point: str, cgroup: Path) -> Path:
    """Return the mount point, moved below `cgroup` if it lies in the usual place."""
    usual = Path("/sys/fs/cgroup")
    return cgroup / Path(point).relative_to(usual) if Path(point).is_relative_to(usual) else Path(point)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def _sizes(file: str) -> dict[str, int]:
    """Return the lines `name:  number kB` of a kernel file, in bytes."""
    fields = (line.split() for line in _lines(file) if line.endswith(" kB"))
    return {words[0][:-1]: int(words[1]) * 1024 for words in fields if len(words) == 3 and words[1].isdecimal()}


def _lines(file: str | Path) -> list[str]:
    """Return the lines of a file; none if it is missing, unreadable or not text."""
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read().splitlines()
    except (OSError, ValueError):
        return []
