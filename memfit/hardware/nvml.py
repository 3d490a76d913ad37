"""Reads how much of an NVIDIA device each process holds, from NVIDIA's management library (NVML).

`nvml` is always a module with the functions of `pynvml` (package nvidia-ml-py), which is optional. Devices are looked up by
UUID or PCI bus id, because NVML ignores CUDA_VISIBLE_DEVICES.

Not covered: a container with its own process ids, where NVML lists the host's; Windows (WDDM), where it lists no bytes. Both
read as unknown.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


def load_nvml() -> Any | None:
    """Import and initialize `pynvml`; None if it or NVIDIA's driver is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package once called pynvml warns that it was renamed
            import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def find_device(nvml: Any, properties: Any) -> Any | None:
    """Return NVML's handle for the device that `torch.cuda.get_device_properties` describes; None if NVML does not know it."""
    uuid = getattr(properties, "uuid", None)  # torch 2.5
    if uuid is not None:
        for prefix in ("MIG-", "GPU-"):
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, f"{prefix}{uuid}")
            if handle is not None:
                return handle
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    return _ask(nvml, nvml.nvmlDeviceGetHandleByPciBusId, f"{domain:08x}:{bus:02x}:{slot:02x}.0")


def held_by_processes(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    """Return the bytes on the device by process id (None for a process NVML reports none for); None if NVML has no list."""
    lists = [_ask(nvml, getattr(nvml, name, None), handle) for name in _LISTS]
    known = [entries for entries in lists if entries is not None]
    if not known:
        return None
    held: dict[int, int | None] = {}
    for entry in (entry for entries in known for entry in entries):
        if held.get(entry.pid) is None:  # a process that computes and draws is in two lists
            held[entry.pid] = entry.usedGpuMemory
    return held


def own_and_others(held: dict[int, int | None] | None, pid: int | None = None) -> tuple[int | None, int | None]:
    """Return the bytes of this process and of all others together; None for what the list does not contain."""
    own = (held or {}).get(os.getpid() if pid is None else pid)
    if held is None or own is None:
        return None, None
    amounts = list(held.values())
    others = None if None in amounts else sum(amount for amount in amounts if amount is not None) - own
    return own, others


def is_shared_slice(nvml: Any, handle: Any) -> bool:
    """Whether the device is split into MIG slices and `handle` is the whole device, including other slices' processes."""
    if _ask(nvml, getattr(nvml, "nvmlDeviceIsMigDeviceHandle", None), handle):
        return False
    mode = _ask(nvml, getattr(nvml, "nvmlDeviceGetMigMode", None), handle)
    return bool(mode and mode[0])


def _ask(nvml: Any, question: Any | None, *arguments: Any) -> Any | None:
    """Return the answer, or None if this NVML, driver or device has none."""
    if question is None:
        return None
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None
