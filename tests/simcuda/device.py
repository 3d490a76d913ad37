"""Puts the device into the process, and changes it while it runs."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .build import NAME, native
from .sizes import size

WORKSPACE = (4096 * 2 + 16 * 8) << 10
"""Bytes of cuBLAS's workspace, and those on cards from Hopper on."""
WORKSPACE_FROM_HOPPER = 32 << 20


def install(
    devices: int = 1,
    capacity: int | str | Sequence[int | str] = "8GiB",
    *,
    context: int | str = 0,
    others: int | str = 0,
    name: str = "NVIDIA A100-SXM4-40GB",
    capability: tuple[int, int] = (8, 0),
    workspace: int | str | None = None,
    fused_attention: bool = True,
    poison: int = -1,
) -> None:
    """Make devices of such a capacity, of which `CUDA_VISIBLE_DEVICES` leaves some. The second call in a process changes
    everything but how `torch` sees them: their name, and how many there are.

    `context` and `others` are bytes that this process holds beside the allocator, and that other processes hold. `workspace` is
    cuBLAS's (None: by the capability). `poison` is a byte that fresh memory is filled with; -1 leaves it as it is.
    """
    each = [capacity] * devices if isinstance(capacity, (int, str)) else list(capacity)
    assert len(each) == devices, f"{len(each)} capacities for {devices} devices"
    visible = _visible(devices)
    first = not installed()
    held = size(_workspace(tuple(capability)) if workspace is None else workspace)
    native().configure(len(visible), [size(each[i]) for i in visible], size(context), held, poison, fused_attention)
    for i in range(len(visible)):
        set_others(others, i)
        native().set_fraction(_fraction(), i)
    if first:
        from . import collectives, torch_c, torch_cuda

        torch_c.fill(native(), capability=tuple(capability))
        torch_cuda.fill(native(), name=name, capability=tuple(capability), visible=visible)
        collectives.fill()
        atexit.register(_let_go)


def installed() -> bool:
    """Whether this process has it."""
    return NAME in sys.modules


def _let_go() -> None:
    """Wait until autograd's threads have let go of the last backward: one that still does while Python ends aborts the process
    (with a GPU, too)."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        time.sleep(0.2)  # gloo's threads do the same, and nobody can ask them
    if _autograd_has_threads() and not torch.cuda._is_in_bad_fork():
        native().begin_another_backward()


def _autograd_has_threads() -> bool:
    for thread in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # one may end meanwhile
            if "pt_autograd" in thread.read_text():
                return True
    return False


def _visible(devices: int) -> list[int]:
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(devices))
    found: list[int] = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) >= devices:
            break  # as CUDA does: what follows does not count either
        found.append(int(part))
    return found


def _workspace(capability: tuple[int, int]) -> int:
    """Of `CUBLAS_WORKSPACE_CONFIG` such as ":4096:2:16:8", or cuBLAS's own."""
    parts = [part for part in os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").split(":") if part]
    if parts:
        return sum(int(kib) * int(count) for kib, count in zip(parts[::2], parts[1::2])) << 10
    return WORKSPACE_FROM_HOPPER if capability >= (9, 0) else WORKSPACE


def _fraction() -> float:
    """`per_process_memory_fraction`, the one setting of the allocator that the CPU build of torch does not read itself."""
    texts = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    found = re.search(r"per_process_memory_fraction:([\d.]+)", next(filter(None, texts), ""))
    return float(found[1]) if found else 1.0


def counters() -> dict[str, Any]:
    """Kernels, waits of the host (and for what: `syncs_by`), copies to and from the device since `reset_counters`."""
    return native().counters()


def reset_counters() -> None:
    """Count from zero."""
    native().reset_counters()


def set_capacity(value: int | str, device: int = 0) -> None:
    """Another size of a device."""
    native().set_capacity(device, size(value))


def set_others(value: int | str, device: int = 0) -> None:
    """What other processes hold of a device."""
    native().set_others(device, size(value))


def fail_in(allocations: int, device: int = 0) -> None:
    """Let an allocation fail as if the device were full: the next one for 0, the one after for 1, ...; -1: none."""
    native().fail_in(device, allocations)
