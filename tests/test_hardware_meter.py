"""The meter: real memory of this process and of children on the CPU, hand-made statistics elsewhere."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import in_a_new_process

from memfit._units import KiB, MiB
from memfit.hardware.meter import (
    Level,
    Meter,
    allocator_level,
    host_level,
    mac_resident,
    peak_between,
    reserved_level,
    windows_level,
)

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the proc file system")

CPU = torch.device("cpu")
# What the interpreter and the kernel's batched counters may do in between.
SLACK = 8 * MiB


def clear_refs_works() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def fresh_mebibytes(count: int) -> torch.Tensor:
    """Memory that surely comes from the system and goes back when freed: far above any malloc threshold."""
    return torch.ones(count * MiB, dtype=torch.uint8)


def held_around_an_allocation() -> tuple[int, int, int]:
    """What is held before, with and after 100 MiB. In a new process: in others the C library may keep as much."""
    meter = Meter(CPU)
    before = meter.held()
    block = fresh_mebibytes(100)
    during = meter.held()
    del block
    return before, during, meter.held()


def peaks_around_an_allocation() -> tuple[int, int | None, int | None]:
    """What is held before 100 MiB are touched and freed, the peak, and the peak after it was reset."""
    meter = Meter(CPU)
    before = meter.held()
    fresh_mebibytes(100)
    first = meter.peak()
    meter.reset_peak()
    return before, first, meter.peak()


def reserved_peaks_below_the_record() -> tuple[int, int | None, int | None]:
    """The same of what is reserved, in a process that has reserved four times as much before."""
    fresh_mebibytes(400)
    meter = Meter(CPU, reserved=True)
    before = meter.held()
    torch.empty(100 * MiB, dtype=torch.uint8)
    first = meter.peak()
    meter.reset_peak()
    return before, first, meter.peak()


@pytest.mark.slow
@linux
def test_held_follows_an_allocation_up_and_down() -> None:
    before, during, after = in_a_new_process(held_around_an_allocation)
    assert abs(during - before - 100 * MiB) < SLACK
    assert abs(after - before) < SLACK


@pytest.mark.slow
@linux
@pytest.mark.skipif(not clear_refs_works(), reason="this system does not let VmHWM be cleared")
def test_peak_remembers_what_is_freed_until_it_is_reset() -> None:
    before, first, second = in_a_new_process(peaks_around_an_allocation)
    assert first is not None and abs(first - before - 100 * MiB) < SLACK
    assert second is not None and abs(second - before) < SLACK


@pytest.mark.slow
@linux
def test_what_is_reserved_counts_untouched_and_its_peak_shows_below_the_record() -> None:
    """The kernel's record of the address space cannot be cleared: a larger peak before must not hide a later one."""
    before, first, second = in_a_new_process(reserved_peaks_below_the_record)
    assert first is not None and abs(first - before - 100 * MiB) < SLACK
    assert second is not None and abs(second - before) < SLACK


@pytest.mark.slow
@linux
def test_lifting_the_record_takes_nothing_that_rlimit_data_counts() -> None:
    fresh_mebibytes(400)
    before = reserved_level().held
    meter = Meter(CPU, reserved=True)
    assert meter.held() - before < SLACK


@pytest.mark.slow
@linux
def test_under_a_limit_on_address_space_the_record_is_left_alone() -> None:
    script = """
import resource, torch
from memfit.hardware.meter import Meter, reserved_level
torch.ones(400 << 20, dtype=torch.uint8)
now = reserved_level()
resource.setrlimit(resource.RLIMIT_AS, (now.counted + (200 << 20),) * 2)
meter = Meter(torch.device("cpu"), reserved=True)
torch.ones(100 << 20, dtype=torch.uint8)
print((reserved_level().counted - now.counted) >> 20, meter.peak() is None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    grown, unknown = done.stdout.split()
    assert int(grown) < 100 and unknown == "True"


@pytest.mark.slow
@linux
@pytest.mark.skipif(not clear_refs_works(), reason="this system does not let VmHWM be cleared")
def test_file_pages_do_not_count_as_peak(tmp_path: Path) -> None:
    """A mapped data set fills RAM with pages that nobody has to hold."""
    script = """
import mmap, sys, torch
from memfit.hardware.meter import Meter
file = open(sys.argv[1], "r+b")
torch.ones(1).add_(1)
meter = Meter(torch.device("cpu"))
before = meter.held()
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
touched = sum(mapped[i] for i in range(0, len(mapped), 4096))
print((meter.held() - before) >> 20, (meter.peak() - before) >> 20)
"""
    data = tmp_path / "data"
    data.write_bytes(bytes(64 * MiB))
    done = subprocess.run(
        [sys.executable, "-c", script, str(data)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    held, peak = (int(word) for word in done.stdout.split())
    assert held < 8 and peak < 8, done


def write_status(proc: Path, rss: int, file: int, hwm: int) -> None:
    (proc / "self").mkdir(exist_ok=True)
    lines = {"VmHWM": hwm, "VmRSS": rss, "RssAnon": rss - file, "RssFile": file - 1, "RssShmem": 1}
    (proc / "self/status").write_text("".join(f"{name}:\t{size:8} kB\n" for name, size in lines.items()))


@pytest.mark.parametrize("writable", [True, False])
def test_reset_writes_the_kernels_code_where_it_may(tmp_path: Path, writable: bool) -> None:
    write_status(tmp_path, rss=1000, file=100, hwm=5000)
    if not writable:
        (tmp_path / "self/clear_refs").mkdir()  # opening it for writing fails, for root too
    Meter(CPU, proc=str(tmp_path)).reset_peak()
    if writable:
        assert (tmp_path / "self/clear_refs").read_text() == "5"


def test_without_clearing_the_peak_is_known_once_the_record_breaks(tmp_path: Path) -> None:
    (tmp_path / "self/clear_refs").mkdir(parents=True)
    write_status(tmp_path, rss=1000, file=100, hwm=5000)
    meter = Meter(CPU, proc=str(tmp_path))
    assert meter.held() == 900 * KiB
    write_status(tmp_path, rss=2000, file=100, hwm=5000)
    assert meter.peak() is None  # anything up to 4900 may have come and gone
    write_status(tmp_path, rss=2000, file=100, hwm=6000)
    assert meter.peak() == 5900 * KiB
    meter.reset_peak()
    assert meter.peak() is None


def test_status_without_anonymous_pages_counts_resident_ones(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("VmRSS:\t 10 kB\n")
    assert host_level(str(tmp_path)) == Level(10 * KiB, 10 * KiB, None)
    assert Meter(CPU, proc=str(tmp_path)).peak() is None


# ---- the rule


@pytest.mark.parametrize(
    ("start", "now", "peak"),
    [
        pytest.param(Level(5, 5, 9, freed=3), Level(7, 7, 9, freed=3), 7, id="nothing given back: now is the most"),
        pytest.param(Level(5, 5, 9, freed=3), Level(7, 7, 9, freed=4), None, id="given back below the record: unknown"),
        pytest.param(Level(5, 5, 9, freed=3), Level(7, 7, 12, freed=4), 12, id="record broken"),
        pytest.param(Level(9, 9, 9, freed=3), Level(7, 7, 9, freed=4), 9, id="started at the record"),
        pytest.param(Level(9, 9, 9, freed=3), Level(7, 7, 8, freed=4), None, id="somebody cleared the record"),
        pytest.param(Level(5, 8, 8), Level(6, 9, 20), 17, id="file pages are taken off"),
        pytest.param(Level(5, 8, 8), Level(6, 19, 20), 7, id="file pages came after the peak"),
        pytest.param(Level(5, 8, 8), Level(4, 19, 19), 5, id="never below what was held at the start"),
        pytest.param(
            Level(50 * MiB, 50 * MiB, 50 * MiB + 8192),
            Level(9 * MiB, 9 * MiB, 50 * MiB + 8192),
            50 * MiB + 8192,
            id="started as near the record as the kernel counts",
        ),
        pytest.param(
            Level(50 * MiB, 50 * MiB, 50 * MiB),
            Level(9 * MiB, 9 * MiB, 50 * MiB - 45056),
            50 * MiB,
            id="the record fell by as little as the kernel's counting moves it",
        ),
        pytest.param(Level(200 * MiB, 200 * MiB, 900 * MiB), Level(9 * MiB, 9 * MiB, 900 * MiB), None, id="started below it"),
        pytest.param(Level(900 * MiB, 900 * MiB, 900 * MiB), Level(9 * MiB, 9 * MiB, 90 * MiB), None, id="cleared by somebody"),
        pytest.param(Level(5, 5, None), Level(9, 9, None), None, id="no record"),
    ],
)
def test_peak_between(start: Level, now: Level, peak: int | None) -> None:
    assert peak_between(start, now) == peak


# ---- other platforms


def statistics(current: int, peak: int, freed: int, in_use: int = 0) -> dict:
    reserved = {"current": current, "peak": peak, "allocated": current + freed, "freed": freed}
    return {"reserved_bytes": {"all": reserved}, "allocated_bytes": {"all": {"current": in_use}}}


def test_allocator_level_reads_reserved_bytes() -> None:
    assert allocator_level(statistics(5, 9, 3, in_use=4)) == Level(5, 5, 9, 3, cached=1)
    assert allocator_level({}) == Level(0, 0, 0, 0)


def test_meter_on_cuda_adds_what_lies_beyond_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.hardware import meter as module
    from memfit.hardware.driver import DriverMemory

    now = statistics(100 * MiB, 100 * MiB, 0)
    driver = [DriverMemory(total=1000 * MiB, free=700 * MiB, reserved=100 * MiB, allocated=0)]
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or now)
    monkeypatch.setattr(module, "read_driver", lambda device, nvml: driver[0])
    meter = Meter(torch.device("cuda:1"))
    assert meter.held() == 300 * MiB and asked[-1] == torch.device("cuda:1")
    now = statistics(250 * MiB, 400 * MiB, 150 * MiB)
    assert (meter.held(), meter.in_use(), meter.peak()) == (450 * MiB, 200 * MiB, 600 * MiB)
    driver[0] = DriverMemory(total=1000 * MiB, free=500 * MiB, reserved=250 * MiB, allocated=0)
    assert meter.held() == 450 * MiB  # the driver is asked on refresh only
    meter.refresh()
    assert (meter.held(), meter.peak()) == (500 * MiB, 650 * MiB)


def test_meter_never_resets_the_scripts_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.hardware import meter as module
    from memfit.hardware.driver import DriverMemory

    def forbidden(*_: object) -> None:
        raise AssertionError("touches what the script may be reading, or waits for the device")

    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: statistics(5, 9, 3))
    monkeypatch.setattr(module, "read_driver", lambda device, nvml: DriverMemory(10, 5, 5, 5))
    meter = Meter(torch.device("cuda:0"))
    meter.reset_peak()
    assert (meter.held(), meter.peak()) == (5, 5)


class FakeKernel32:
    def __init__(self, works: bool = True) -> None:
        self.works = works

    def K32GetProcessMemoryInfo(self, process, pointer, size) -> int:
        counters = pointer._obj
        assert process.value == ctypes.c_void_p(-1).value and size == ctypes.sizeof(counters) == 72
        raw = (ctypes.c_uint64 * 9).from_buffer(counters)
        raw[1:9] = [11, 12, 13, 14, 15, 16, 17, 18]
        return int(self.works)


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="the fake lays out 64-bit counters")
def test_windows_counts_committed_bytes() -> None:
    assert windows_level(FakeKernel32()) == Level(17, 17, 18)
    assert windows_level(FakeKernel32(works=False)).record is None


class FakeLibc:
    def __init__(self, result: int) -> None:
        self.result = result

    def proc_pid_rusage(self, pid: int, flavor: int, pointer) -> int:
        raw = pointer._obj
        assert ctypes.sizeof(raw) == 96 and flavor == 0
        raw[:] = range(100, 112)
        return self.result


def test_mac_reads_resident_bytes() -> None:
    assert mac_resident(FakeLibc(0)) == 108  # after the uuid (2 words): user, system, two wakeups, pageins, wired
    assert mac_resident(FakeLibc(-1)) is None
