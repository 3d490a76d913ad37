"""A real limit on the memory of this process, set by the demo on processes of its own.

Not covered: systems where a process cannot be limited (Windows, macOS); there memfit is told a budget, and that is said.
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
class Limit:
    """What was done."""

    real: bool
    """Whether the system holds this process to it."""
    budget: int | None
    """What memfit has to be told; None where it finds the limit itself."""
    said: str
    """How, in words."""


def limited_device() -> torch.device:
    """Where the demo trains: on CUDA if there is some, else on the CPU."""
    device = default_device()
    return device if device.type == "cuda" else torch.device("cpu")


def can_limit(device: torch.device) -> bool:
    """Whether a process can be limited here."""
    return device.type == "cuda" or (sys.platform == "linux" and "VmData" in read_status())


def limit_this_process(allowed: int, device: torch.device) -> Limit:
    """Let this process take `allowed` bytes more than it has now."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
        return Limit(True, None, "torch.cuda.set_per_process_memory_fraction")
    _start_threads()
    if not can_limit(device):
        return Limit(False, allowed, f"budget={format_bytes(allowed).replace(' ', '')!r}, as this system has no such limit")
    import resource

    most = read_status()["VmData"] + allowed
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return Limit(True, None, "RLIMIT_DATA")


def _start_threads() -> None:
    """Threads that compute are started once, and their stacks belong to the process, not to the training."""
    nn.Linear(512, 512)(torch.ones(512, 512)).sum().backward()
