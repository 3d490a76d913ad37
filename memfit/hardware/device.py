"""Describes the device to train on at one moment: what it is, what is free, what this process holds, what limits it.

Not covered: accelerators other than CUDA (ROCm included), XPU and MPS; changes after that moment. The parts for accelerators
are tested with hand-made handles.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit._errors import UsageError
from memfit._units import format_bytes
from memfit.hardware.driver import ALLOCATOR_VARIABLES, DriverMemory, numbered, read_driver
from memfit.hardware.dtypes import cpu_facts, cpu_fast_dtypes, cuda_fast_dtypes, hip_build, xpu_fast_dtypes
from memfit.hardware.limits import Limit, host_limits, physical
from memfit.hardware.meter import host_level

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Device:
    """Describes a device at one moment, as seen from this process."""

    kind: str
    """"cpu", "cuda" (ROCm included), "mps" or "xpu"."""
    index: int | None
    """Its index among devices of its kind, as torch counts them; None if there is only one."""
    name: str
    """The maker's name for it."""
    total: int
    """Bytes this process could have if all others left: the smallest `total` of `limits`."""
    free: int
    """Bytes this process can still get, including blocks cached by its own allocator: the smallest `left` of `limits`."""
    held: int
    """Bytes this process holds, on the scale of `Meter`."""
    cached: int = 0
    """Bytes counted in both `held` and `free`: the allocator caches them for reuse."""
    others: int | None = None
    """Bytes that other processes hold on the device; None if unknown."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for other kinds."""
    fast_dtypes: tuple[str, ...] = ("float32",)
    """Those of "float32", "bfloat16" and "float16" in which it computes at least as fast as in float32."""
    limits: tuple[Limit, ...] = ()
    """What limits this process's memory here, tightest first."""
    here: bool = True
    """False for a catalogue card, on which nothing can be measured."""
    notes: tuple[str, ...] = ()
    """Relevant circumstances: allocator settings, slices, fractions, what could not be determined."""

    @property
    def in_use(self) -> int:
        """Bytes this process holds and cannot reuse: `in_use + free` is all it can have."""
        return self.held - self.cached

    def __str__(self) -> str:
        return f"{self.name} ({self.kind if self.index is None else f'{self.kind}:{self.index}'})"


def query_device(device: torch.device | None = None, *, nvml: Any | None = None) -> Device:
    """Describe `device` as it is now. None means the current accelerator if torch has one, else the CPU.

    `nvml` is a module like pynvml (`load_nvml()`); without it, other processes on a CUDA device are unknown and its context's
    memory is estimated. This creates the context of an accelerator that has none yet. Nothing is allocated.

    Raises UsageError if torch cannot use the device, or if the amount of memory cannot be determined.
    """
    chosen = default_device() if device is None else device
    _check_usable(chosen)
    if chosen.type == "cpu":
        return photograph_cpu()
    if chosen.type == "mps":
        return _photograph_mps()
    return _photograph_driver(chosen, nvml)


def default_device() -> torch.device:
    """Return the current accelerator if torch has a supported one, else the CPU."""
    import torch

    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind)
        if backend.is_available():
            return torch.device(kind, backend.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _check_usable(device: torch.device) -> None:
    import torch

    backends = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps, "cpu": torch.cpu}
    backend = backends.get(device.type)
    if backend is None:
        kinds = "'cuda', 'xpu', 'mps' and 'cpu'"
        raise UsageError(f"device={str(device)!r}", found=f"memfit knows {kinds}", next_move="use one of these")
    if not backend.is_available():
        found = f"this torch ({torch.__version__}) sees no {device.type} device"
        raise UsageError(
            f"device={str(device)!r}", found=found, next_move="check the driver and torch's build, or use 'cpu'"
        )
    count = backend.device_count() if device.type in ("cuda", "xpu") else 1
    if device.index is not None and device.index >= count:
        found = f"torch sees {count} {device.type} device{'s' * (count != 1)}, counted from 0"
        raise UsageError(f"device={str(device)!r}", found=found, next_move="choose one of these")


# ---- CPU


def photograph_cpu(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> Device:
    """Describe the CPU, with the proc file system and the cgroups at these paths."""
    limits = host_limits(proc, cgroup)
    total, free = _tightest(limits)
    name, flags = cpu_facts(proc)
    return Device(
        kind="cpu",
        index=None,
        name=name,
        total=total,
        free=free,
        held=host_level(proc).held,
        fast_dtypes=cpu_fast_dtypes(flags),
        limits=limits,
        notes=tuple(_system_notes(platform.system(), platform.release())),
    )


# ---- CUDA, ROCm and XPU


def _photograph_driver(device: torch.device, nvml: Any | None) -> Device:
    import torch

    chosen = numbered(device)
    properties = getattr(torch, chosen.type).get_device_properties(chosen)
    return device_from_driver(chosen.type, chosen.index, properties, read_driver(chosen, nvml))


def device_from_driver(kind: str, index: int, properties: Any, memory: DriverMemory) -> Device:
    """Build the description of a device from torch's properties and the driver's numbers."""
    limits = memory.limits(f"{kind}:{index}")
    total, free = _tightest(limits)
    rocm = getattr(properties, "gcnArchName", "") if hip_build() else ""
    capability = (properties.major, properties.minor) if kind == "cuda" else None
    return Device(
        kind=kind,
        index=index,
        name=properties.name,
        total=total,
        free=free,
        held=memory.reserved + (memory.beyond if kind == "cuda" else 0),
        cached=memory.cached,
        others=memory.others,
        capability=capability,
        fast_dtypes=xpu_fast_dtypes(properties) if capability is None else cuda_fast_dtypes(capability, rocm),
        limits=limits,
        notes=(
            *_driver_notes(kind, properties, memory),
            *environment_notes(os.environ),
            *_system_notes(platform.system(), platform.release()),
        ),
    )


# ---- MPS


def _photograph_mps() -> Device:
    import torch

    recommended = torch.mps.recommended_max_memory()
    held, allocated = torch.mps.driver_allocated_memory(), torch.mps.current_allocated_memory()
    return device_from_metal(recommended, held, allocated, physical(), os.environ)


def device_from_metal(
    recommended: int, held: int, allocated: int, shared: tuple[Limit, ...], environ: Mapping[str, str]
) -> Device:
    """Build the description from Metal's numbers. The memory is the machine's own, so its limits (`shared`) count too."""
    cached = max(0, held - allocated)
    found = [Limit("Metal's recommended working set", max(0, recommended - held), recommended), *shared]
    limits = tuple(Limit(limit.name, limit.left + cached, limit.total) for limit in sorted(found, key=_left))
    total, free = _tightest(limits)
    return Device(
        kind="mps",
        index=None,
        name=platform.processor() or "Apple GPU",
        total=total,
        free=free,
        held=held,
        cached=cached,
        fast_dtypes=("float32", "float16"),
        limits=limits,
        notes=("memory is shared with the CPU", *environment_notes(environ)),
    )


# ---- common


def _left(limit: Limit) -> int:
    return limit.left


def _tightest(limits: tuple[Limit, ...]) -> tuple[int, int]:
    """Return the smallest `total` and the smallest `left`. Raises UsageError without limits."""
    if not limits:
        found = f"neither the kernel nor the standard library tells on {platform.system() or 'this system'}"
        raise UsageError(
            "how much memory there is", found=found, next_move="use a system with /proc, or an accelerator"
        )
    return min(limit.total for limit in limits), min(limit.left for limit in limits)


def _driver_notes(kind: str, properties: Any, memory: DriverMemory) -> Iterator[str]:
    if " MIG " in properties.name:
        yield "MIG slice"
    if memory.fraction < 1:
        yield f"per-process memory fraction {memory.fraction:g}"
    if getattr(properties, "is_integrated", False) or getattr(properties, "is_integrated_gpu", False):
        yield "memory is shared with the CPU"
    if kind == "cuda" and memory.own is None and memory.beyond:
        yield (
            f"other processes unknown (NVML does not say): {format_bytes(memory.beyond)} beyond the allocator "
            "count as held; some may be theirs"
        )


def environment_notes(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield environment variables that change how memory behaves: reported, never changed."""
    for name in (*ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_MPS_HIGH_WATERMARK_RATIO"):
        if environ.get(name):
            yield f"{name} {environ[name]}"
    limit = environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    if limit or environ.get("CUDA_MPS_PIPE_DIRECTORY") or environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        yield "CUDA MPS active" + (f", memory limited to {limit}" if limit else "")


def _system_notes(system: str, release: str) -> Iterator[str]:
    if "microsoft" in release.lower():
        yield "WSL"
    elif system == "Windows":
        yield "Windows"
