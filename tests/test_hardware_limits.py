"""The readers of host memory limits, over kernel files laid out by hand and once over a real limit."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from memfit._units import GiB, KiB, MiB
from memfit.hardware.limits import (
    Limit,
    cgroup_limits,
    host_limits,
    mac_memory,
    physical,
    read_status,
    rlimits,
    windows_memory,
)

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the proc file system")

V2_MOUNT = "31 23 0:28 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


class Machine:
    """A root folder with just the kernel files a test needs."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = str(root / "proc"), str(root / "cgroup")
        self.write("proc/self/cgroup", "")
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = Path(self.proc).parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, directory: str, files: Mapping[str, object]) -> None:
        (Path(self.cgroup) / directory).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            self.write(f"cgroup/{directory}/{name}", f"{value}\n")

    def limits(self) -> dict[str, Limit]:
        return {limit.name: limit for limit in cgroup_limits(self.proc, self.cgroup)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v2(limit: object, current: int, inactive_file: int = 0, **more: object) -> dict[str, object]:
    files = {"memory.max": limit, "memory.current": current, "memory.stat": f"anon 7\ninactive_file {inactive_file}"}
    return files | {name.replace("_", "."): value for name, value in more.items()}


def v1(limit: object, usage: int, inactive_file: int = 0, hierarchy: int = 1) -> dict[str, object]:
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": usage,
        "memory.use_hierarchy": hierarchy,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_file}",
    }


# ---- cgroup v2


def test_v2_reads_the_cgroup_and_every_ancestor_up_to_the_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b/c\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group("a/b/c", v2("max", 1 * GiB))
    machine.group("a/b", v2(6 * GiB, 2 * GiB, inactive_file=512 * MiB))
    machine.group("a", v2(5 * GiB, 3 * GiB))
    machine.group(".", {"memory.stat": "inactive_file 5"})  # the root cgroup has no memory.max

    assert machine.limits() == {
        "cgroup v2 memory.max of /a/b": Limit("cgroup v2 memory.max of /a/b", 4 * GiB + 512 * MiB, 6 * GiB),
        "cgroup v2 memory.max of /a": Limit("cgroup v2 memory.max of /a", 2 * GiB, 5 * GiB),
    }


def test_v2_memory_high_counts_because_the_kernel_stalls_beyond_it(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group("job", v2(4 * GiB, 1 * GiB, memory_high=3 * GiB))
    assert machine.limits()["cgroup v2 memory.high of /job"] == Limit("cgroup v2 memory.high of /job", 2 * GiB, 3 * GiB)
    assert machine.limits()["cgroup v2 memory.max of /job"].left == 3 * GiB


def test_v2_over_its_limit_has_nothing_left_and_cache_never_counts_twice(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/over/cached\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group("over", v2(1 * GiB, 2 * GiB))
    machine.group("over/cached", v2(1 * GiB, 1 * MiB, inactive_file=5 * MiB))
    found = machine.limits()
    assert found["cgroup v2 memory.max of /over"].left == 0
    assert found["cgroup v2 memory.max of /over/cached"].left == 1 * GiB


def test_container_namespace_sees_its_own_cgroup_as_the_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group(".", v2(2 * GiB, 1 * GiB))
    assert machine.limits()["cgroup v2 memory.max of /"].left == 1 * GiB


def test_mount_that_shows_a_sub_hierarchy_is_entered_below_its_root(machine: Machine) -> None:
    """Docker on the host's cgroup namespace: the path is the host's, the mount shows the container's part."""
    machine.write("proc/self/cgroup", "0::/docker/abc/worker\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/docker/abc", point="/sys/fs/cgroup"))
    machine.group(".", v2(2 * GiB, 1 * GiB))
    machine.group("worker", v2(1 * GiB, 256 * MiB))
    # What a reader that ignores the mount's root would find instead.
    machine.group("docker/abc/worker", v2(1, 1))
    assert {name: limit.left for name, limit in machine.limits().items()} == {
        "cgroup v2 memory.max of /worker": 768 * MiB,
        "cgroup v2 memory.max of /": 1 * GiB,
    }


def test_mount_at_the_process_own_cgroup_does_not_enter_a_child_of_the_same_name(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/a", point="/sys/fs/cgroup"))
    machine.group(".", v2(2 * GiB, 1 * GiB))
    machine.group("a", v2(1, 1))
    assert list(machine.limits()) == ["cgroup v2 memory.max of /"]


def test_mount_in_a_parent_namespace_is_matched_by_its_dotted_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../other\n")
    mounts = [("/", "/sys/fs/cgroup/inside"), ("/..", "/sys/fs/cgroup/outside")]
    machine.write("proc/self/mountinfo", "\n".join(V2_MOUNT.format(root=root, point=point) for root, point in mounts))
    machine.group("inside", v2(1 * GiB, 1 * GiB))
    machine.group("outside/other", v2(3 * GiB, 1 * GiB))
    assert list(machine.limits()) == ["cgroup v2 memory.max of /other"]


@pytest.mark.parametrize("path", ["/../..", "/../../elsewhere/deep"])
def test_path_outside_the_namespace_falls_back_to_what_is_mounted(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group(".", v2(3 * GiB, 1 * GiB))
    machine.write("memory.max", "1")  # what joining the dots would reach: outside the mount
    assert list(machine.limits()) == ["cgroup v2 memory.max of /"]


def test_path_of_the_host_under_a_bound_part_is_found_by_its_end(machine: Machine) -> None:
    """A bind mount of a sub-hierarchy that claims to be the root: only the end of the path exists."""
    machine.write("proc/self/cgroup", "0::/kubepods/pod1/main\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group("main", v2(1 * GiB, 0))
    assert list(machine.limits()) == ["cgroup v2 memory.max of /main"]


def test_of_two_mounts_the_one_with_more_ancestors_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    mounts = [("/a/b", "/sys/fs/cgroup/part"), ("/", "/sys/fs/cgroup/all")]
    lines = [V2_MOUNT.format(root=root, point=point) for root, point in mounts]
    machine.write("proc/self/mountinfo", "\n".join(lines))
    machine.group("part", v2(2 * GiB, 0))
    machine.group("all/a/b", v2(2 * GiB, 0))
    machine.group("all/a", v2(1 * GiB, 0))
    assert list(machine.limits()) == ["cgroup v2 memory.max of /a/b", "cgroup v2 memory.max of /a"]


def test_escaped_mount_point(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup/with\\040space"))
    machine.group("with space", v2(2 * GiB, 0))
    assert machine.limits()["cgroup v2 memory.max of /"].total == 2 * GiB


@pytest.mark.parametrize("mountinfo", [None, "garbage\n\n1 2 3 - x\n"])
def test_without_mountinfo_the_usual_places_are_read(machine: Machine, mountinfo: str | None) -> None:
    machine.write("proc/self/cgroup", "4:memory:/job\n0::/\n")
    if mountinfo is not None:
        machine.write("proc/self/mountinfo", mountinfo)
    machine.group("memory/job", v1(2 * GiB, 1 * GiB))
    assert list(machine.limits()) == ["cgroup v1 memory.limit_in_bytes of /job"]


# ---- cgroup v1 and both


def test_v1_reads_ancestors_and_skips_no_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/b\n1:cpuset:/elsewhere\n")
    machine.write("proc/self/mountinfo", V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"))
    machine.group("memory/a/b", v1(4 * GiB, 3 * GiB, inactive_file=1 * GiB))
    machine.group("memory/a", v1(5 * GiB, 3 * GiB))
    machine.group("memory", v1(9223372036854771712, 7 * GiB))
    assert {name: (limit.left, limit.total) for name, limit in machine.limits().items()} == {
        "cgroup v1 memory.limit_in_bytes of /a/b": (2 * GiB, 4 * GiB),
        "cgroup v1 memory.limit_in_bytes of /a": (2 * GiB, 5 * GiB),
    }


def test_v1_parent_that_does_not_count_its_children_does_not_bound_them(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/a/b\n")
    machine.write("proc/self/mountinfo", V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"))
    machine.group("memory/a/b", v1(4 * GiB, 1 * GiB))
    machine.group("memory/a", v1(1 * GiB, 1 * GiB, hierarchy=0))
    assert list(machine.limits()) == ["cgroup v1 memory.limit_in_bytes of /a/b"]


@pytest.mark.parametrize("controller", ["v1", "v2"])
def test_hybrid_mounts_find_memory_wherever_it_is_controlled(machine: Machine, controller: str) -> None:
    machine.write("proc/self/cgroup", "4:memory:/job\n1:cpu:/job\n0::/unit\n")
    mounts = [
        V1_CPU_MOUNT,
        V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"),
        V2_MOUNT.format(root="/", point="/sys/fs/cgroup/unified"),
    ]
    machine.write("proc/self/mountinfo", "\n".join(mounts))
    machine.group("unified/unit", v2(3 * GiB, 1 * GiB) if controller == "v2" else {"cgroup.procs": 1})
    machine.group("memory/job", v1(2 * GiB, 1 * GiB) if controller == "v1" else {"cgroup.procs": 1})
    expected = {"v1": "cgroup v1 memory.limit_in_bytes of /job", "v2": "cgroup v2 memory.max of /unit"}
    assert list(machine.limits()) == [expected[controller]]


@pytest.mark.parametrize("text", ["", "lots", "12 34", "-5", "1e9", "\x00"])
def test_malformed_bound_is_ignored_and_its_parent_still_counts(machine: Machine, text: str) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group("a/b", v2(text, 1 * GiB))
    machine.group("a", v2(2 * GiB, 1 * GiB))
    assert list(machine.limits()) == ["cgroup v2 memory.max of /a"]


def test_unreadable_usage_leaves_the_bound_standing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group("a", {"memory.max": 2 * GiB, "memory.current": "?", "memory.stat": "inactive_file many\nx"})
    assert machine.limits()["cgroup v2 memory.max of /a"].left == 2 * GiB


def test_bytes_that_are_not_text_are_ignored(machine: Machine) -> None:
    machine.group("a", v2(2 * GiB, 0))
    Path(machine.proc, "self/cgroup").write_bytes(b"\xff\xfe0::/a\n")
    assert machine.limits() == {}


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert cgroup_limits(str(tmp_path / "none"), str(tmp_path / "none")) == ()


# ---- rlimits


class FakeResource:
    """The two functions and constants of the module `resource` that are read."""

    RLIM_INFINITY = -1
    RLIMIT_AS = 9
    RLIMIT_DATA = 2

    def __init__(self, soft: dict[int, int]) -> None:
        self.soft = soft

    def getrlimit(self, number: int) -> tuple[int, int]:
        return self.soft.get(number, -1), -1


STATUS = "Name:\tpython\nVmSize:\t 2097152 kB\nVmData:\t 1048576 kB\nVmHWM:\t bad kB\n"


def test_rlimits_are_held_against_what_the_kernel_counts(machine: Machine) -> None:
    machine.write("proc/self/status", STATUS)
    resource = FakeResource({FakeResource.RLIMIT_AS: 5 * GiB, FakeResource.RLIMIT_DATA: 3 * GiB})
    assert rlimits(machine.proc, resource) == (
        Limit("RLIMIT_AS", 3 * GiB, 5 * GiB),
        Limit("RLIMIT_DATA", 2 * GiB, 3 * GiB),
    )


def test_rlimits_that_are_off_unknown_or_exceeded(machine: Machine) -> None:
    assert rlimits(machine.proc, FakeResource({2: 5 * GiB})) == ()  # no status to hold them against
    machine.write("proc/self/status", STATUS)
    assert rlimits(machine.proc, FakeResource({})) == ()
    assert rlimits(machine.proc, None) == ()  # Windows has no such module
    assert rlimits(machine.proc, FakeResource({2: 1 * MiB})) == (Limit("RLIMIT_DATA", 0, 1 * MiB),)


def test_status_is_read_in_bytes_without_malformed_lines(machine: Machine) -> None:
    machine.write("proc/self/status", STATUS)
    assert read_status(machine.proc) == {"VmSize": 2 * GiB, "VmData": 1 * GiB}


@pytest.mark.slow
@linux
def test_a_real_rlimit_of_a_child_process_is_seen() -> None:
    script = """
import resource
from memfit.hardware.limits import host_limits, read_status
size = read_status()["VmData"] + 64 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (size, size))
tightest = host_limits()[0]
assert (tightest.name, tightest.total) == ("RLIMIT_DATA", size), tightest
assert 48 * 2**20 < tightest.left <= 64 * 2**20, tightest
try:
    bytearray(tightest.left + 4 * 2**20)
except MemoryError:
    bytearray(tightest.left - 4 * 2**20)
    print("kept")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("kept\n", "")


# ---- the machine


def test_physical_memory_is_what_the_kernel_calls_available(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\nHugePages_Total: 0\n")
    assert physical(machine.proc) == (Limit("physical memory", 4 * GiB, 8 * GiB),)


@linux
def test_physical_memory_without_meminfo_comes_from_sysconf(tmp_path: Path) -> None:
    (fallback,), (real,) = physical(str(tmp_path)), physical()
    assert abs(fallback.total - real.total) < 0.02 * real.total
    assert 0 < fallback.left <= fallback.total


class FakeKernel32:
    def __init__(self, works: bool = True) -> None:
        self.works = works

    def GlobalMemoryStatusEx(self, pointer) -> int:
        status = pointer._obj
        assert status.length == ctypes.sizeof(status) == 64
        raw = (ctypes.c_uint64 * 8).from_buffer(status)
        raw[1:5] = [16 * GiB, 5 * GiB, 20 * GiB, 3 * GiB]
        return int(self.works)


def test_windows_has_two_bounds() -> None:
    assert windows_memory(FakeKernel32()) == (
        Limit("physical memory", 5 * GiB, 16 * GiB),
        Limit("Windows commit limit", 3 * GiB, 20 * GiB),
    )
    assert windows_memory(FakeKernel32(works=False)) == ()


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               1000.
Pages active:                           500000.
Pages inactive:                           2000.
Pages speculative:                         300.
Pages wired down:                        90000.
"""


def test_mac_counts_free_speculative_and_inactive_pages() -> None:
    assert mac_memory(VM_STAT, 16 * GiB) == (Limit("physical memory", 3300 * 16 * KiB, 16 * GiB),)
    assert mac_memory("", 16 * GiB) == ()


# ---- all of it


def test_host_limits_come_tightest_first(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    machine.write("proc/self/status", STATUS)
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.group("a", v2(6 * GiB, 3 * GiB))
    resource = FakeResource({FakeResource.RLIMIT_DATA: 2 * GiB})
    found = host_limits(machine.proc, machine.cgroup, resource)
    assert [(limit.name, limit.left) for limit in found] == [
        ("RLIMIT_DATA", 1 * GiB),
        ("cgroup v2 memory.max of /a", 3 * GiB),
        ("physical memory", 4 * GiB),
    ]


@linux
def test_this_machine_has_sane_limits() -> None:
    found = host_limits()
    assert any(limit.name == "physical memory" for limit in found)
    assert all(0 <= limit.left <= limit.total for limit in found)


def test_without_the_resource_module_as_on_windows_there_are_no_rlimits() -> None:
    script = """
import sys
sys.modules["resource"] = None
import memfit
from memfit.hardware.limits import host_limits
print(memfit.probe(device="cpu").room > 0, [limit.name for limit in host_limits() if "RLIMIT" in limit.name])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "[]"]
