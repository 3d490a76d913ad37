"""Photographs: a real one of the CPU, and of accelerators from hand-written library handles."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memfit._errors import UsageError
from memfit._units import GiB, MiB
from memfit.hardware import device as device_module
from memfit.hardware.device import (
    Device,
    device_from_driver,
    device_from_metal,
    environment_notes,
    photograph_cpu,
    query_device,
)
from memfit.hardware.driver import BEYOND_MOST, DriverMemory, identity, memory_fraction, read_backend, trusted
from memfit.hardware.dtypes import cpu_facts, cpu_fast_dtypes, cuda_fast_dtypes, xpu_fast_dtypes
from memfit.hardware.limits import Limit
from memfit.hardware.nvml import find_device, held_by_processes, is_shared_slice, load_nvml, own_and_others

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the proc file system")

PID = os.getpid()


class FakeNvml:
    """The functions of pynvml that are asked, over a table of devices by their UUID or bus id."""

    class NVMLError(Exception):
        pass

    def __init__(self, handles: dict[str, str], processes: dict[str, list], mig: tuple[str, ...] = ()) -> None:
        self.handles, self.processes, self.mig = handles, processes, mig
        self.asked: list[str] = []

    def _find(self, key: str) -> str:
        self.asked.append(key)
        if key not in self.handles:
            raise self.NVMLError("not found")
        return self.handles[key]

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByPciBusId = _find

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list:
        if handle not in self.processes:
            raise self.NVMLError("no permission")
        return self.processes[handle]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list:
        raise self.NVMLError("not supported")

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:
        return handle.startswith("slice")

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        return (1, 1) if handle in self.mig else (0, 0)


def process(pid: int, size: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=size)


A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-40GB", major=8, minor=0, total_memory=40 * GiB, uuid="aa-bb", is_integrated=0
)


class FakeCuda:
    """The functions of `torch.cuda` that are asked."""

    def __init__(self, free: int, total: int, reserved: int, allocated: int, properties=A100) -> None:
        self.memory = free, total
        self.reserved, self.allocated, self.properties = reserved, allocated, properties

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.memory

    def memory_reserved(self, index: int) -> int:
        return self.reserved

    def memory_allocated(self, index: int) -> int:
        return self.allocated

    def get_device_properties(self, index: int):
        return self.properties


# ---- driver numbers


MEMORY = DriverMemory(total=40 * GiB, free=20 * GiB, reserved=6 * GiB, allocated=4 * GiB)


def test_cached_blocks_are_both_held_and_free() -> None:
    assert MEMORY.cached == 2 * GiB
    assert MEMORY.limits("cuda:0") == (Limit("memory of cuda:0", 22 * GiB, 40 * GiB),)


def test_without_nvml_what_lies_beyond_the_allocator_is_estimated_but_never_a_whole_neighbour() -> None:
    assert replace(MEMORY, free=33 * GiB).beyond == 1 * GiB
    assert MEMORY.beyond == BEYOND_MOST == 2 * GiB  # 14 GiB are missing: most of it is somebody else's
    assert replace(MEMORY, free=35 * GiB).beyond == 0


def test_nvml_settles_what_lies_beyond_the_allocator() -> None:
    assert replace(MEMORY, own=6 * GiB + 500 * MiB).beyond == 500 * MiB


def test_nvml_is_not_believed_where_it_contradicts_driver_and_allocator() -> None:
    """In a container the list holds the host's process numbers: one may be ours by accident."""
    for own in (1 * GiB, 21 * GiB):
        assert trusted(replace(MEMORY, own=own, others=3)) == MEMORY
    ours = replace(MEMORY, own=7 * GiB, others=3)
    assert trusted(ours) == ours


@pytest.mark.parametrize(("reserved", "left"), [(6 * GiB, 6 * GiB), (30 * GiB, 26 * GiB)])
def test_memory_fraction_bounds_what_the_allocator_may_reserve(reserved: int, left: int) -> None:
    memory = replace(MEMORY, reserved=reserved, fraction=0.25)
    assert memory.limits("cuda:0")[0] == Limit("per-process memory fraction 0.25", left, 10 * GiB)


def test_memory_fraction_does_not_help_where_the_device_is_full() -> None:
    memory = replace(MEMORY, free=1 * GiB, fraction=0.5)
    assert [limit.left for limit in memory.limits("cuda:0")] == [3 * GiB, 16 * GiB]


@pytest.mark.parametrize(
    ("environ", "fraction"),
    [
        ({}, 1.0),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.5"}, 0.5),
        ({"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:.25"}, 0.25),
        ({"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:1.0"}, 1.0),
        ({"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:7"}, 1.0),
    ],
)
def test_memory_fraction_of_an_older_torch_comes_from_the_environment(environ: dict, fraction: float) -> None:
    assert memory_fraction(object(), 0, environ) == fraction


def test_memory_fraction_is_asked_of_torch_where_it_can_be() -> None:
    backend = SimpleNamespace(get_per_process_memory_fraction=lambda index: {1: 0.5}[index])
    assert memory_fraction(backend, 1, {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.1"}) == 0.5


def test_backend_and_nvml_are_read_together() -> None:
    nvml = FakeNvml({"GPU-aa-bb": "gpu"}, {"gpu": [process(PID, 7 * GiB), process(1, 3 * GiB)]})
    cuda = FakeCuda(free=20 * GiB, total=40 * GiB, reserved=6 * GiB, allocated=4 * GiB)
    assert read_backend(cuda, 0, {}, nvml) == replace(MEMORY, own=7 * GiB, others=3 * GiB)
    assert read_backend(cuda, 0, {}) == MEMORY


def test_device_that_cannot_be_asked_for_its_free_memory_is_taken_as_ours_alone() -> None:
    class FakeXpu(FakeCuda):
        def mem_get_info(self, index: int):
            raise RuntimeError("The device doesn't support querying the available free memory.")

    assert read_backend(FakeXpu(0, 0, 6 * GiB, 4 * GiB), 0, {}).free == 34 * GiB
    whole = FakeCuda(0, 0, 6 * GiB, 4 * GiB)
    names = ("memory_reserved", "memory_allocated", "get_device_properties")
    old = SimpleNamespace(**{name: getattr(whole, name) for name in names})
    assert read_backend(old, 0, {}).free == 34 * GiB


def test_other_errors_of_the_driver_surface() -> None:
    class Broken(FakeCuda):
        def mem_get_info(self, index: int):
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        read_backend(Broken(0, 0, 0, 0), 0, {})


# ---- NVML


def test_device_is_found_by_uuid_slices_first_never_by_index() -> None:
    nvml = FakeNvml({"GPU-aa-bb": "gpu", "MIG-aa-bb": "slice"}, {})
    assert find_device(nvml, A100) == "slice"
    del nvml.handles["MIG-aa-bb"]
    assert find_device(nvml, A100) == "gpu"
    assert not hasattr(nvml, "nvmlDeviceGetHandleByIndex")


@pytest.mark.parametrize(
    ("properties", "told"),
    [
        (SimpleNamespace(uuid="GPU-4f", pci_bus_id=0x3B, pci_device_id=0, pci_domain_id=1), "GPU-4f"),
        (SimpleNamespace(pci_bus_id=0x3B, pci_device_id=0, pci_domain_id=1), (1, 0x3B, 0)),
        (SimpleNamespace(), 0),
    ],
)
def test_a_device_is_told_from_others_by_what_all_processes_see(
    monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace, told: object
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert identity(torch.device("cuda", 0)) == told
    assert identity(torch.device("cpu")) is None


def test_device_is_found_by_bus_where_there_is_no_uuid() -> None:
    nvml = FakeNvml({"00000001:3b:00.0": "gpu"}, {})
    properties = SimpleNamespace(pci_bus_id=0x3B, pci_device_id=0, pci_domain_id=1)
    assert find_device(nvml, properties) == "gpu"
    assert find_device(nvml, SimpleNamespace()) is None


def test_processes_of_all_lists_are_joined() -> None:
    nvml = FakeNvml({}, {"gpu": [process(1, None), process(2, 5)]})
    assert held_by_processes(nvml, "gpu") == {1: None, 2: 5}
    more = [process(1, 7), process(2, None), process(3, 1)]
    setattr(nvml, "nvmlDeviceGetMPSComputeRunningProcesses", lambda handle: more if handle == "gpu" else None)  # noqa: B010
    assert held_by_processes(nvml, "gpu") == {1: 7, 2: 5, 3: 1}
    assert held_by_processes(nvml, "hidden") is None


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (None, (None, None)),
        ({}, (None, None)),
        ({1: 5, 2: 6, 3: 7}, (5, 13)),
        ({1: 5}, (5, 0)),
        ({2: 6}, (None, None)),  # another process namespace: we are not in the list
        ({1: None, 2: 6}, (None, None)),  # Windows
        ({1: 5, 2: None}, (5, None)),
    ],
)
def test_own_and_others(held, expected) -> None:
    assert own_and_others(held, pid=1) == expected


def test_processes_of_other_mig_slices_are_not_others() -> None:
    nvml = FakeNvml({"GPU-aa-bb": "gpu"}, {"gpu": [process(PID, 7 * GiB), process(1, 3 * GiB)]}, mig=("gpu",))
    assert is_shared_slice(nvml, "gpu") and not is_shared_slice(nvml, "slice 1")
    memory = read_backend(FakeCuda(20 * GiB, 40 * GiB, 6 * GiB, 4 * GiB), 0, {}, nvml)
    assert (memory.own, memory.others) == (7 * GiB, None)


def test_load_nvml_initialises_or_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Exception):
        pass

    def fails() -> None:
        raise Missing

    started = []
    works = SimpleNamespace(NVMLError=Missing, nvmlInit=lambda: started.append(1))
    monkeypatch.setitem(sys.modules, "pynvml", works)
    assert load_nvml() is works and started == [1]
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=Missing, nvmlInit=fails))
    assert load_nvml() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load_nvml() is None


# ---- CUDA and XPU photographs


def test_cuda_photograph_adds_up() -> None:
    memory = replace(MEMORY, own=7 * GiB, others=13 * GiB)
    found = device_from_driver("cuda", 1, A100, memory)
    assert (found.total, found.free, found.held, found.cached) == (40 * GiB, 22 * GiB, 7 * GiB, 2 * GiB)
    assert found.in_use + found.free + 13 * GiB == found.total
    assert (found.others, found.capability, str(found)) == (13 * GiB, (8, 0), "NVIDIA A100-SXM4-40GB (cuda:1)")
    assert not any("unknown" in note for note in found.notes)


def test_cuda_photograph_says_what_it_had_to_guess() -> None:
    found = device_from_driver("cuda", 0, A100, MEMORY)
    assert (found.held, found.others) == (8 * GiB, None)
    assert any("other processes unknown" in note and "2.00 GiB" in note for note in found.notes)


def test_memory_fraction_makes_a_smaller_device() -> None:
    found = device_from_driver("cuda", 0, A100, replace(MEMORY, fraction=0.25))
    assert (found.total, found.free) == (10 * GiB, 6 * GiB)
    assert "per-process memory fraction 0.25" in found.notes


def test_slices_and_shared_memory_are_noted() -> None:
    properties = SimpleNamespace(**vars(A100) | {"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "is_integrated": 1})
    notes = device_from_driver("cuda", 0, properties, MEMORY).notes
    assert "MIG slice" in notes and "memory is shared with the CPU" in notes


def test_xpu_counts_reserved_bytes_only() -> None:
    properties = SimpleNamespace(name="Intel Data Center GPU Max", has_fp16=True)
    found = device_from_driver("xpu", 0, properties, MEMORY)
    assert (found.held, found.capability, found.fast_dtypes) == (6 * GiB, None, ("float32", "float16"))


def test_environment_is_reported() -> None:
    environ = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G",
        "HOME": "/",
    }
    assert list(environment_notes(environ)) == [
        "PYTORCH_ALLOC_CONF expandable_segments:True",
        "CUDA MPS active, memory limited to 0=2G",
    ]
    assert list(environment_notes({"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})) == ["CUDA MPS active"]
    assert list(environment_notes({"PYTORCH_CUDA_ALLOC_CONF": ""})) == []


def test_system_is_noted_where_memory_behaves_differently() -> None:
    assert list(device_module._system_notes("Linux", "5.15.153.1-microsoft-standard-WSL2")) == ["WSL"]
    assert list(device_module._system_notes("Windows", "11")) == ["Windows"]
    assert list(device_module._system_notes("Linux", "6.1.0-18-amd64")) == []


# ---- fast dtypes


@pytest.mark.parametrize(
    ("capability", "rocm", "fast"),
    [
        ((6, 1), "", {"float32"}),
        ((7, 0), "", {"float32", "float16"}),
        ((7, 5), "", {"float32", "float16"}),
        ((8, 0), "", {"float32", "float16", "bfloat16"}),
        ((12, 0), "", {"float32", "float16", "bfloat16"}),
        ((9, 0), "gfx906:sramecc+", {"float32", "float16"}),
        ((9, 4), "gfx942", {"float32", "float16", "bfloat16"}),
    ],
)
def test_cuda_fast_dtypes(capability: tuple[int, int], rocm: str, fast: set[str]) -> None:
    assert set(cuda_fast_dtypes(capability, rocm)) == fast


def test_cpu_is_fast_in_bfloat16_only_with_instructions_for_it() -> None:
    assert cpu_fast_dtypes(frozenset({"avx512f", "avx512_vnni"})) == ("float32",)
    assert cpu_fast_dtypes(frozenset({"avx512_bf16"})) == ("float32", "bfloat16")
    assert cpu_fast_dtypes(frozenset({"amx_bf16", "amx_tile"})) == ("float32", "bfloat16")


def test_xpu_with_matrix_engines_is_fast_in_both() -> None:
    properties = SimpleNamespace(has_subgroup_matrix_multiply_accumulate=True)
    assert set(xpu_fast_dtypes(properties)) == {"float32", "bfloat16", "float16"}
    assert xpu_fast_dtypes(SimpleNamespace()) == ("float32",)


def test_cpu_facts_stop_at_the_first_core(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Fast 9000\nflags\t\t: sse avx512_bf16\n\nmodel name\t: Other\n")
    assert cpu_facts(str(tmp_path)) == ("Fast 9000", frozenset({"sse", "avx512_bf16"}))


def test_cpu_facts_without_cpuinfo_come_from_torch(tmp_path: Path) -> None:
    name, flags = cpu_facts(str(tmp_path))
    assert name and all(isinstance(flag, str) for flag in flags)
    if hasattr(torch.cpu, "get_capabilities"):
        assert "l1d_cache_size" not in flags and len(flags) > 0


# ---- MPS


def test_metal_shares_memory_with_the_cpu() -> None:
    shared = (Limit("physical memory", 3 * GiB, 16 * GiB),)
    found = device_from_metal(11 * GiB, held=5 * GiB, allocated=4 * GiB, shared=shared, environ={})
    assert (found.total, found.free, found.held, found.cached) == (11 * GiB, 4 * GiB, 5 * GiB, 1 * GiB)
    assert found.limits[0].name == "physical memory"
    assert found.in_use + found.free == 8 * GiB


# ---- CPU and choosing


@linux
def test_photograph_of_this_cpu() -> None:
    found = query_device(torch.device("cpu"))
    block = torch.ones(100 * MiB, dtype=torch.uint8)
    later = query_device(torch.device("cpu"))
    assert abs(later.held - found.held - block.numel()) < 8 * MiB
    assert (found.kind, found.index, found.cached, found.others) == ("cpu", None, 0, None)
    assert found.free == found.limits[0].left and 0 < found.free <= found.total


@linux
def test_cpu_total_is_the_least_bound_not_the_machine(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "proc/self/status": "VmRSS: 2048 kB\nRssAnon: 1024 kB\n",
        "cgroup/memory.max": f"{4 * GiB}",
        "cgroup/memory.current": f"{1 * GiB}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = photograph_cpu(str(tmp_path / "proc"), str(tmp_path / "cgroup"))
    assert (found.total, found.free, found.held) == (4 * GiB, 3 * GiB, 1 * MiB)


def test_without_an_accelerator_the_cpu_is_photographed() -> None:
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has an accelerator")
    assert query_device().kind == "cpu"


@pytest.mark.parametrize("name", ["meta", "cpu:1"])
def test_device_torch_cannot_train_on_is_an_error_with_a_way_out(name: str) -> None:
    with pytest.raises(UsageError, match=f"device='{name}'"):
        query_device(torch.device(name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_accelerator_is_an_error_with_a_way_out() -> None:
    with pytest.raises(UsageError, match=r"sees no cuda device\n.*'cpu'"):
        query_device(torch.device("cuda"))


def test_unknown_memory_is_an_error_not_a_zero() -> None:
    with pytest.raises(UsageError, match="how much memory there is"):
        device_module._tightest(())


def test_device_is_a_value() -> None:
    made = Device("cpu", None, "x", total=3, free=2, held=1)
    assert made == Device("cpu", None, "x", total=3, free=2, held=1) and hash(made)
    assert str(made) == "x (cpu)"


def test_importing_the_room_starts_no_device() -> None:
    script = "import sys, torch, memfit.hardware.budget\nassert not torch.cuda.is_initialized() and 'pynvml' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=ROOT)


# ---- a real device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_photograph_follows_a_real_allocation() -> None:
    from memfit.hardware.meter import Meter

    chosen = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before, meter = query_device(chosen, nvml=load_nvml()), Meter(chosen, nvml=load_nvml())
    block = torch.ones(256 * MiB, dtype=torch.uint8, device=chosen)
    after = query_device(chosen, nvml=load_nvml())
    assert abs(after.held - before.held - 256 * MiB) < 64 * MiB
    assert abs(before.free - after.free - 256 * MiB) < 64 * MiB
    assert abs(meter.held() - after.held) < 64 * MiB
    del block
    cached = query_device(chosen, nvml=load_nvml())
    assert cached.cached >= 256 * MiB and abs(cached.free - before.free) < 64 * MiB
    peak = meter.peak()
    assert peak is not None and abs(peak - after.held) < 64 * MiB
