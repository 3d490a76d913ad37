"""Sets a real memory limit on the demo's own processes.

Not covered: systems where a process cannot be limited (Windows, macOS). There the demo passes a budget to memfit, and says so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from memfit._units import format_bytes
from memfit.hardware.device import default_device
from memfit.hardware.limits import read_status


@dataclass(frozen=True)
class DemoLimit:
    """The memory limit of this process."""

    real: bool
    """Whether the system enforces it."""
    budget: int | None
    """The budget in bytes to pass to memfit; None where memfit finds the limit itself."""
    said: str
    """How it was set, in words."""


def limited_device() -> torch.device:
    """Return the demo's device: CUDA if available, else the CPU."""
    device = default_device()
    return device if device.type == "cuda" else torch.device("cpu")


def can_limit(device: torch.device) -> bool:
    """Return whether this system can limit a process."""
    return device.type == "cuda" or (sys.platform == "linux" and "VmData" in read_status())


def limit_this_process(allowed: int, device: torch.device) -> DemoLimit:
    """Limit this process to `allowed` bytes: on CUDA in total, on the CPU beyond what it holds now."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
        return DemoLimit(True, None, "torch.cuda.set_per_process_memory_fraction")
    _start_threads()
    if not can_limit(device):
        return DemoLimit(False, allowed, f"budget={format_bytes(allowed).replace(' ', '')!r}, as this system has no such limit")
    import resource

    most = read_status()["VmData"] + allowed
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return DemoLimit(True, None, "RLIMIT_DATA")


def _start_threads() -> None:
    """Start the compute threads before the limit is set: their stacks belong to the process, not to the training."""
    nn.Linear(512, 512)(torch.ones(512, 512)).sum().backward()
