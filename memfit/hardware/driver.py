"""Reads what the driver and torch's caching allocator report about a CUDA or XPU device, for this process.

Querying the driver creates a context on the device (hundreds of MiB) if there is none yet, so only the device in question is
queried. Nothing here synchronizes, allocates or changes a setting.

Not covered: memory that Windows lends from the host; fragmentation, which can keep cached blocks from being handed out (they
count
as free: the allocator releases whole segments before it fails).
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit._units import GiB
from memfit.hardware.limits import Limit
from memfit.hardware.nvml import find_device, held_by_processes, is_shared_slice, own_and_others

if TYPE_CHECKING:
    import torch

# Published contexts with kernels take up to 1.8 GiB (A100, eager loading; usually 0.3-0.9). What is missing beyond that belongs
# to other processes. Counting it as ours would make a budget in bytes meaningless.
BEYOND_MOST = 2 * GiB

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True)
class DriverMemory:
    """The numbers of one device at one moment."""

    total: int
    """Bytes of the device, or of its MIG slice."""
    free: int
    """Bytes the driver can still give to any process."""
    reserved: int
    """Bytes that torch's allocator took from the driver."""
    allocated: int
    """Bytes of `reserved` that tensors use."""
    fraction: float = 1.0
    """Fraction of `total` that torch's allocator may reserve."""
    own: int | None = None
    """Bytes of this process according to NVML; None if unknown."""
    others: int | None = None
    """Bytes of other processes according to NVML; None if unknown."""

    @property
    def cached(self) -> int:
        """Bytes the allocator holds and can hand out again."""
        return max(0, self.reserved - self.allocated)

    @property
    def beyond(self) -> int:
        """Bytes of this process outside the allocator: context, libraries. An upper bound without NVML."""
        if self.own is not None:
            return max(0, self.own - self.reserved)
        return min(max(0, self.total - self.free - self.reserved), BEYOND_MOST)

    def limits(self, label: str) -> tuple[Limit, ...]:
        """Return what limits this process on the device called `label`, tightest first."""
        found = [Limit(f"memory of {label}", self.free + self.cached, self.total)]
        if self.fraction < 1:
            allowed = int(self.total * self.fraction)
            left = max(0, allowed - self.reserved) + self.cached
            found.append(Limit(f"per-process memory fraction {self.fraction:g}", left, allowed))
        return tuple(sorted(found, key=lambda limit: limit.left))


def trusted(memory: DriverMemory) -> DriverMemory:
    """Drop NVML's figures if they cannot be ours: in a container, another process may have our process id."""
    if memory.own is None or memory.reserved <= memory.own <= memory.total - memory.free:
        return memory
    return replace(memory, own=None, others=None)


def numbered(device: torch.device) -> torch.device:
    """Return `device` with its index: "cuda" means the current device, which may change."""
    import torch

    if device.index is not None:
        return device
    return torch.device(device.type, getattr(torch, device.type).current_device())


def identity(device: torch.device) -> Hashable:
    """Return an identity for an accelerator that is the same in all processes; None for other devices. The index may differ,
    because each process may see other devices (CUDA_VISIBLE_DEVICES)."""
    import torch

    if device.type not in ("cuda", "xpu"):
        return None
    properties = getattr(torch, device.type).get_device_properties(device)
    uuid, bus = getattr(properties, "uuid", None), getattr(properties, "pci_bus_id", None)  # since torch 2.5, 2.8
    if uuid is not None:
        return str(uuid)
    return device.index if bus is None else (properties.pci_domain_id, bus, properties.pci_device_id)


def read_driver(device: torch.device, nvml: Any | None = None) -> DriverMemory:
    """Read what driver, allocator and NVML report now about `device` ("cuda" or "xpu", with index)."""
    import torch

    return read_backend(getattr(torch, device.type), device.index, os.environ, nvml)


def read_backend(backend: Any, index: int, environ: Mapping[str, str], nvml: Any | None = None) -> DriverMemory:
    """`read_driver` for a module like `torch.cuda`."""
    properties = backend.get_device_properties(index)
    reserved, allocated = backend.memory_reserved(index), backend.memory_allocated(index)
    free, total = _driver_free(backend, index, properties.total_memory, reserved)
    own, others = (None, None) if nvml is None else _by_nvml(nvml, properties)
    fraction = memory_fraction(backend, index, environ)
    return trusted(DriverMemory(total, free, reserved, allocated, fraction, own, others))


def memory_fraction(backend: Any, index: int, environ: Mapping[str, str]) -> float:
    """Return the fraction of the device that torch's allocator may reserve, as far as it can be read."""
    if hasattr(backend, "get_per_process_memory_fraction"):  # torch 2.8
        return float(backend.get_per_process_memory_fraction(index))
    settings = " ".join(environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    found = re.search(r"per_process_memory_fraction:\s*(0?\.\d+|0|1(?:\.0*)?)(?![\d.])", settings)
    return float(found[1]) if found else 1.0


def _driver_free(backend: Any, index: int, total: int, reserved: int) -> tuple[int, int]:
    """Return free and total bytes, as if alone if the driver cannot be queried (some Intel devices, XPU before torch 2.6)."""
    alone = max(0, total - reserved), total
    if not hasattr(backend, "mem_get_info"):
        return alone
    try:
        return backend.mem_get_info(index)
    except RuntimeError as error:
        if "support querying" not in str(error):
            raise
        return alone


def _by_nvml(nvml: Any, properties: Any) -> tuple[int | None, int | None]:
    handle = find_device(nvml, properties)
    if handle is None:
        return None, None
    own, others = own_and_others(held_by_processes(nvml, handle))
    return own, None if is_shared_slice(nvml, handle) else others
