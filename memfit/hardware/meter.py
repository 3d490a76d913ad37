"""Measures the bytes this process holds on a device, now and at the peak since a given moment. Cheap enough for every step.

Not covered: this process's swapped-out pages, memory shared with other processes, two meters on the same host memory at once
(the kernel keeps one record, or peak, per process). The kernel counts in batches per core: with many cores its record can be
off by some MiB (0.75 with 2 cores, 6 with 16; see `BATCHED`).

Two scales on the CPU: *resident* is what lies in RAM, which cgroups and the machine limit; *reserved* is what the process has
requested, touched or not, which RLIMIT_DATA and RLIMIT_AS limit (getrlimit(2)). Kernels reserve scratch and code buffers that
they hardly touch, so the two differ by tens of MiB for convolutions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.hardware.driver import numbered, read_driver
from memfit.hardware.limits import is_set, read_status

if TYPE_CHECKING:
    import torch


_CORES = os.cpu_count() or 1
BATCHED = max(1 << 20, 3 * max(32, 2 * _CORES) * _CORES * mmap.PAGESIZE)
"""Bytes by which the record may differ from the count, and fall without being cleared. Linux since 6.2 counts pages of three
kinds per core, in batches of max(32, 2 x cores) (lib/percpu_counter.c). It adds up the cores for the current value
(fs/proc/task_mmu.c, since 6.17), but not for the record. VmHWM is then the larger of the two at the time of reading."""


@dataclass(frozen=True)
class Level:
    """One reading of a counter that also keeps a record (its peak)."""

    held: int
    """Bytes this process holds."""
    counted: int
    """Bytes the record counts: `held`, and what the record does not separate from it (file pages in RAM)."""
    record: int | None
    """Peak bytes counted, ever or since the record was cleared; None if no record is kept."""
    freed: int | None = None
    """Total bytes released so far; None if not counted."""
    cached: int = 0
    """Bytes of `held` that no tensor uses: the allocator can hand them out again."""


class Meter:
    """Reads the bytes this process holds on one device; never synchronizes it and never resets torch's statistics.

    On the CPU under Linux these are the anonymous pages in RAM; under macOS the resident and under Windows the committed bytes.
    On CUDA they are the allocator's reserved bytes, plus context and libraries as of the last `refresh()`. On XPU they are the
    reserved bytes, on MPS all that Metal allocated for this process.

    On the CPU under Linux, `reserved` counts the private writable memory that the process has requested instead. `proc` is the
    root of the proc file system, `nvml` a module like pynvml (without it, context and libraries on CUDA are estimated).
    """

    def __init__(
        self, device: torch.device, *, reserved: bool = False, proc: str = "/proc", nvml: Any | None = None
    ) -> None:
        device = numbered(device) if device.type in ("cuda", "xpu") else device
        if reserved and device.type == "cpu":
            self._read, self._clear = partial(reserved_level, proc), _Padding(proc).renew
        else:
            self._read = _reader(device, proc)
            self._clear = partial(_clear_record, proc) if device.type == "cpu" else _nothing
        self._measure_beyond = _beyond_reader(device, nvml)
        self.refresh()
        self.reset_peak()

    def held(self) -> int:
        """Return the bytes this process holds now."""
        return self._read().held + self._beyond

    def in_use(self) -> int:
        """Return the bytes this process holds now and cannot reuse: `held()` without the allocator's cache."""
        level = self._read()
        return level.held - level.cached + self._beyond

    def reset_peak(self) -> None:
        """Reset the peak. On Linux this clears the process's VmHWM if the kernel allows it."""
        self._clear()
        self._start = self._read()

    def peak(self) -> int | None:
        """Return the peak bytes held since `reset_peak()` or construction; None if the platform cannot tell."""
        most = peak_between(self._start, self._read())
        return None if most is None else most + self._beyond

    @property
    def beyond(self) -> int:
        """Bytes that this process holds outside the allocator, as of the last `refresh()`."""
        return self._beyond

    def refresh(self) -> None:
        """Query the driver again for memory outside the allocator (it grows as kernels load). Slow: not for every step."""
        self._beyond = self._measure_beyond()


def peak_between(start: Level, now: Level) -> int | None:
    """Return the peak bytes held between two readings, or None if the record cannot tell.

    Three cases are certain: nothing was released in between (then `now` is the peak); the record was exceeded since `start`; or
    `start` stood at the record, within the kernel's accuracy, which then is the peak. A record that fell by more than that was
    cleared by somebody else. File pages that came or went since the peak distort the difference, so the result is at least what
    was held at either end.
    """
    if now.freed is not None and now.freed == start.freed:
        return max(start.held, now.held)
    near = BATCHED if now.freed is None else 0
    if now.record is None or start.record is None or now.record < start.record - near:
        return None
    if now.record > start.record or start.counted >= start.record - near:
        return max(now.record - (now.counted - now.held), now.held, start.held)
    return None


# ---- readers


def host_level(proc: str = "/proc") -> Level:
    """Read this process's anonymous memory, as the platform counts it."""
    status = read_status(proc)
    if "VmRSS" in status:
        held = status.get("RssAnon", status["VmRSS"])
        file = status.get("RssFile", 0) + status.get("RssShmem", 0)
        return Level(held, held + file, status.get("VmHWM"))
    if sys.platform == "win32":
        return windows_level(ctypes.WinDLL("kernel32"))
    return _unix_level()


def reserved_level(proc: str = "/proc") -> Level:
    """Read this process's private writable memory, touched or not, as RLIMIT_DATA counts it (VmData; the record is VmPeak)."""
    status = read_status(proc)
    return Level(status.get("VmData", 0), status.get("VmSize", 0), status.get("VmPeak"))


class _Padding:
    """Inaccessible address space that lifts VmSize to its record VmPeak, which cannot be cleared: any growth then shows.

    It holds no memory, and RLIMIT_DATA does not count it. RLIMIT_AS does: if that is set, nothing is padded.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._padding: mmap.mmap | None = None

    def renew(self) -> None:
        self._padding = None
        status = read_status(self._proc)
        missing = status.get("VmPeak", 0) - status.get("VmSize", 0)
        if missing <= 0 or is_set("RLIMIT_AS"):
            return
        try:
            self._padding = mmap.mmap(-1, missing, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        except (OSError, ValueError):
            pass  # peak() then uses the record as it is


def allocator_level(statistics: dict[str, Any]) -> Level:
    """Read the nested statistics of torch's caching allocator (empty before the device is first used)."""
    reserved = statistics.get("reserved_bytes", {}).get("all", {})
    held, most = reserved.get("current", 0), reserved.get("peak", 0)
    allocated = statistics.get("allocated_bytes", {}).get("all", {}).get("current", 0)
    return Level(held, held, most, reserved.get("freed", 0), held - allocated)


class _ProcessMemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of the Windows API."""

    _fields_ = [("size", ctypes.c_uint32), ("faults", ctypes.c_uint32)] + [
        (name, ctypes.c_size_t)
        for name in ("rss_peak", "rss", "paged_peak", "paged", "pool_peak", "pool", "committed", "committed_peak")
    ]


def windows_level(kernel32: Any) -> Level:
    """Read this process's committed bytes, which Windows limits, from K32GetProcessMemoryInfo of `kernel32`."""
    counters = _ProcessMemoryCounters(size=ctypes.sizeof(_ProcessMemoryCounters))
    this_process = ctypes.c_void_p(-1)
    if not kernel32.K32GetProcessMemoryInfo(this_process, ctypes.byref(counters), counters.size):
        return Level(0, 0, None)
    return Level(counters.committed, counters.committed, counters.committed_peak)


def mac_resident(libc: Any) -> int | None:
    """Return this process's resident bytes from proc_pid_rusage of `libc`; None if it refuses."""
    usage = (ctypes.c_uint64 * 12)()  # struct rusage_info_v0: 16 bytes of uuid, then ten counters of 8 bytes
    failed = libc.proc_pid_rusage(os.getpid(), 0, ctypes.byref(usage))
    return None if failed else usage[8]


def _unix_level() -> Level:
    """Read the resident bytes without /proc (macOS, BSD), and the record that getrusage keeps."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    record = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    resident = mac_resident(ctypes.CDLL(None)) if sys.platform == "darwin" else None
    held = record if resident is None else resident
    return Level(held, held, record)


def _metal_level() -> Level:
    import torch

    held = torch.mps.driver_allocated_memory()
    return Level(held, held, None, cached=max(0, held - torch.mps.current_allocated_memory()))


def _reader(device: torch.device, proc: str) -> Callable[[], Level]:
    import torch

    if device.type == "cpu":
        return partial(host_level, proc)
    if device.type == "mps":
        return _metal_level
    # torch.cuda.memory_reserved() builds flat statistics, which takes several times as long.
    statistics = getattr(torch, device.type).memory_stats_as_nested_dict
    return lambda: allocator_level(statistics(device))


def _beyond_reader(device: torch.device, nvml: Any | None) -> Callable[[], int]:
    if device.type != "cuda":
        return _nothing
    return lambda: read_driver(device, nvml).beyond


def _clear_record(proc: str) -> None:
    try:
        with open(f"{proc}/self/clear_refs", "w") as file:
            file.write("5")  # since Linux 4.0: set VmHWM to what is resident now
    except OSError:
        pass  # not permitted, or not Linux: peak_between() then uses the record as it is


def _nothing() -> int:
    return 0
