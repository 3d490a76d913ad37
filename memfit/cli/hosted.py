"""Runs a script that uses "cuda" on a machine without CUDA: for a plan, its tensors can stay in host memory.

Computation is traced for the requested card; tensors that the script moves there stay on the host. Not covered: calls to
the CUDA driver (`torch.cuda.set_device`, `get_device_properties`), which end in an error that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit._errors import UsageError
from memfit.kernels.autocast import available

_CUDA = re.compile(r"cuda(:\d+)?")
_MISSING = (
    *("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available"),
    "has no attribute '_cuda_",
)
"""Parts of torch's error messages without CUDA (torch/cuda/__init__.py, torch/csrc/cuda)."""


class _OnHost(TorchFunctionMode):
    """Creates tensors for a CUDA device on the CPU, and does not move tensors to a CUDA device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:  # a device alone moves nothing
            return func(*args, **(kwargs or {}))
        numbers = func is torch.Tensor.to
        args = (*args[:1], *(_here(value, numbers) for value in args[1:])) if numbers else tuple(_here(v) for v in args)
        return func(*args, **{name: _here(value, name == "device") for name, value in (kwargs or {}).items()})


def _here(value: Any, numbers: bool = False) -> Any:
    """The CPU for a CUDA device; anything else unchanged. `numbers`: whether an int is a device index."""
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    is_cuda = is_cuda or (isinstance(value, str) and _CUDA.fullmatch(value) is not None)
    return torch.device("cpu") if is_cuda or (numbers and type(value) is int) else value


@contextmanager
def hosting(script: Path, *, elsewhere: bool) -> Iterator[None]:
    """Let a script for CUDA run without CUDA, if it is planned for a card that this machine does not have (`elsewhere`).

    Raises UsageError if the script still needs CUDA. On a machine with CUDA, nothing changes.
    """
    if torch.cuda.is_available():
        yield
        return
    try:
        if elsewhere:
            with available(_nothing), _OnHost():
                yield
        else:
            yield
    except (AssertionError, AttributeError, RuntimeError) as error:
        if not any(text in str(error) for text in _MISSING):
            raise
        raise _needs_cuda(script, error, elsewhere) from error


def _nothing() -> None:
    """Do nothing when an autocast ends: it keeps no copies of weights here."""


def _needs_cuda(script: Path, error: BaseException, elsewhere: bool) -> UsageError:
    line, frames = 0, error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(script):
            line = frames.tb_lineno
        frames = frames.tb_next
    where = f"{script.name}, line {line}," if line else f"{script.name}"
    if elsewhere:
        return UsageError(
            f"the plan of {script.name} on a machine without CUDA",
            found=f"{where} asks the CUDA driver",
            next_move="let it do so only if torch.cuda.is_available(), or name a function that makes the training",
        )
    return UsageError(
        f"the plan of {script.name} for this machine",
        found=f"{where} uses CUDA, and there is none here",
        next_move="name the card it is for, --device a100-40gb or the like: CUDA tensors then stay in host memory",
    )
