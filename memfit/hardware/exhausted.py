"""Detects out-of-memory errors, however torch and its libraries word them, and frees unreferenced memory."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from memfit._errors import RankFailed, first_line

T = TypeVar("T")
TRIES = 3
"""Attempts at something small before its process counts as having no memory left at all."""

# Texts of the same condition from torch's own class, CUDA libraries, MPS, HIP, XPU, the CPU allocator, oneDNN and C++.
_TEXTS = (
    "out of memory",
    "out_of_memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # handles are created at first use, and take memory
    "cudnn_status_alloc_failed",
    "cudnn_status_not_initialized",
    "unable to find an engine to execute this computation",  # every cuDNN engine needs workspace: pytorch/pytorch#108645
    "unable to find a valid cudnn algorithm",
    "cufft_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_insufficient_resources",
    "hipblas_status_alloc_failed",
    "miopenstatusallocfailed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "could not create a memory object",
    "hiperroroutofmemory",
    "cudaerrormemoryallocation",
    "out_of_device_memory",
    "out_of_host_memory",
    "std::bad_alloc",
    "failed to allocate",
    "insufficient memory",
)

# oneDNN says the same of a descriptor it has no implementation for, which a smaller batch does not fix.
_ONEDNN = re.compile("could not create a primitive(?! descriptor)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an out-of-memory error, in any of the words that torch and its libraries use."""
    if isinstance(error, (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, RankFailed):  # (its text may quote what ran out elsewhere)
        return False
    text = str(error).lower()
    return any(known in text for known in _TEXTS) or _ONEDNN.search(text) is not None


def said_by(error: BaseException) -> str:
    """Return an out-of-memory error's text, without the device state and the advice that torch adds."""
    return first_line(error).partition(" GPU ")[0]


def free_unused(device: torch.device) -> None:
    """Free unreferenced memory: run the garbage collector, and empty an accelerator's cache."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def release_workspaces(device: torch.device) -> None:
    """Release the workspaces that cuBLAS keeps per thread and stream: predictions already include them. The next matrix product
    allocates its own again. During capture they stay, because a graph replays with the workspaces it was captured with."""
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type == "cuda" and release is not None and not torch.cuda.is_current_stream_capturing():
        release()


def retry_on_oom(make: Callable[[], T], device: torch.device) -> T:
    """Call `make()`, and retry if it runs out of memory. `make` must change nothing if it fails."""
    for _ in range(TRIES - 1):
        try:
            return make()
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
        free_unused(device)
    return make()


def drop_frames(error: BaseException) -> None:
    """Release what the traceback frames of `error`, its causes and contexts hold."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
