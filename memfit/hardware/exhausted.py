"""Telling that memory ran out, in whatever words torch and its libraries say so, and giving back what nobody refers to."""

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
"""How often something small is tried before its process is taken to have no memory left at all."""

# The many texts of one condition: torch's own class, CUDA libraries, MPS, HIP, XPU, the CPU allocator, oneDNN, C++.
_TEXTS = (
    "out of memory",
    "out_of_memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # handles are made at first use, and take memory
    "cudnn_status_alloc_failed",
    "cudnn_status_not_initialized",
    "unable to find an engine to execute this computation",  # every one of cuDNN's wants workspace: pytorch/pytorch#108645
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

# oneDNN says the same of a descriptor where it has no implementation, which no smaller batch changes.
_ONEDNN = re.compile("could not create a primitive(?! descriptor)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, in any of the words that torch and its libraries use for it."""
    if isinstance(error, (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, RankFailed):  # (whose text may say what ran out elsewhere)
        return False
    text = str(error).lower()
    return any(known in text for known in _TEXTS) or _ONEDNN.search(text) is not None


def said_by(error: BaseException) -> str:
    """What an error says of memory that ran out, without the state of the device and the advice that torch adds."""
    return first_line(error).partition(" GPU ")[0]


def free_unused(device: torch.device) -> None:
    """Give back what nobody refers to."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def release_workspaces(device: torch.device) -> None:
    """Let go of the workspaces that cuBLAS keeps per thread and stream: what is predicted has them in it. The next product of
    matrices makes its own again. A graph that is being captured runs again in those that it has met."""
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type == "cuda" and release is not None and not torch.cuda.is_current_stream_capturing():
        release()


def patiently(make: Callable[[], T], device: torch.device) -> T:
    """`make()`, which changes nothing where it fails, again where memory ran out in it."""
    for _ in range(TRIES - 1):
        try:
            return make()
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
        free_unused(device)
    return make()


def drop_frames(error: BaseException) -> None:
    """Let go of what the frames that `error` went through hold."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
