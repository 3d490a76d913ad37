"""The functions that `torch._C` has in a build with CUDA, as far as `torch.cuda` needs them."""

from __future__ import annotations

import enum
import os
import types
from collections.abc import Callable
from typing import Any

import torch

_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}

Functions = dict[str, Callable[..., Any]]


class _CudaError(enum.IntEnum):
    success = 0
    memoryAllocation = 2


def fill(native: Any, *, capability: tuple[int, int]) -> None:
    """Put them there."""
    for name, value in {**_streams(native), **_memory(native), **_devices(native, capability)}.items():
        setattr(torch._C, name, value)
    torch._C._cudart = cudart(native)  # type: ignore[attr-defined]
    torch._C._has_cuda = True  # type: ignore[attr-defined]


def cudart(native: Any) -> types.ModuleType:
    """The runtime's own functions, as `torch.cuda.cudart()` shows them."""
    module = types.ModuleType("torch._C._cudart")
    done = {
        "cudaProfilerStart": lambda: _CudaError.success,
        "cudaProfilerStop": lambda: _CudaError.success,
        **dict.fromkeys(
            ("cudaHostRegister", "cudaHostUnregister", "cudaStreamCreate", "cudaStreamDestroy"), lambda *_: _CudaError.success
        ),
    }
    told = {
        "cudaError": _CudaError,
        "cudaGetErrorString": lambda code: "no error" if int(code) == 0 else "unknown error",
        "cudaMemGetInfo": lambda device: tuple(native.memory_info(device)),
    }
    for name, value in {**done, **told}.items():
        setattr(module, name, value)
    return module


def _streams(native: Any) -> Functions:
    return {
        "_cuda_getCurrentStream": native.get_stream,
        "_cuda_getDefaultStream": lambda device: (0, device, 1),
        "_cuda_getCurrentRawStream": lambda device: native.get_stream(device)[0],
        "_cuda_setStream": lambda stream_id, device_index, device_type: native.set_stream(stream_id, device_index),
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }


def _memory(native: Any) -> Functions:
    def record(enabled: Any, *rest: Any) -> None:
        most = next((n for n in rest if isinstance(n, int) and not isinstance(n, bool)), 1 << 62)
        native.record_history(bool(enabled), most, bool(enabled))

    return {
        "_cuda_memoryStats": native.memory_stats,
        "_cuda_resetPeakMemoryStats": native.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": native.reset_accumulated,
        "_cuda_emptyCache": native.empty_cache,
        "_cuda_setMemoryFraction": native.set_fraction,
        "_cuda_getMemoryFraction": native.get_fraction,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": lambda n, stream: native.raw_allocate(n, native.get_device(), stream),
        "_cuda_cudaCachingAllocator_raw_delete": native.raw_free,
        "_cuda_memorySnapshot": lambda *_: native.snapshot(),
        "_cuda_record_memory_history": record,
        "_cuda_clearCublasWorkspaces": native.drop_workspaces,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_host_emptyCache": lambda: None,
    }


def _devices(native: Any, capability: tuple[int, int]) -> Functions:
    forked = {"bad": False}
    # As with CUDA: a child by fork can do nothing with a device that its parent used.
    os.register_at_fork(after_in_child=lambda: forked.update(bad=forked["bad"] or torch.cuda._initialized))
    return {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: forked["bad"],
        "_cuda_getDeviceCount": native.device_count,
        "_cuda_getDevice": native.get_device,
        "_cuda_setDevice": native.set_device,
        "_cuda_exchangeDevice": native.exchange_device,
        "_cuda_maybeExchangeDevice": native.exchange_device,
        "_cuda_synchronize": native.synchronize,
        "_cuda_getArchFlags": lambda: "sm_{}{}".format(*capability),
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_set_sync_debug_mode": lambda mode: native.set_sync_debug(_DEBUG_MODES.get(mode, mode)),
        "_cuda_get_sync_debug_mode": native.get_sync_debug,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_getCurrentBlasHandle": lambda: 0,
    }
