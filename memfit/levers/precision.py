"""The precision lever: autocast around each micro-batch's forward. It is the only lever that changes numerics.

Not covered: converting the parameters themselves; float8. The lever never overrides the script's own autocast: if one is
active, the lever stays off.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from memfit._errors import UsageError

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The lever's explicit values, and the dtype in which autocast computes."""


def precision_applied(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which forwards on `device` compute in `precision`. "off" and "float32" change nothing."""
    dtype = PRECISIONS.get(precision)
    if dtype is None or torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def parse_precision(value: str) -> str:
    """Return `value` if the lever knows it. Raises UsageError otherwise."""
    allowed = ("auto", "off", "fast", *PRECISIONS)
    if value not in allowed:
        raise UsageError(
            f"precision={value!r}", found="memfit does not know it", next_move=f"use one of {', '.join(allowed)}"
        )
    return value


def lower_precisions(parameters: Iterable[torch.Tensor], device: torch.device) -> tuple[str, ...]:
    """Return the precisions below the script's own, most accurate first. Empty under autocast or if not all is float32."""
    if any(p.dtype is not torch.float32 for p in parameters if p.is_floating_point()):
        return ()
    if torch.is_autocast_enabled(device.type):
        return ()
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return ("float16",)  # torch.cuda.is_bf16_supported() counts emulation, and asks the current device
    return ("bfloat16", "float16")


def script_precision(parameters: Iterable[torch.Tensor], device: torch.device) -> str:
    """Return the precision in which the script computes: that of its autocast, else of its floating-point parameters."""
    if torch.is_autocast_enabled(device.type):
        return _name(torch.get_autocast_dtype(device.type))
    found = {p.dtype for p in parameters if p.is_floating_point()}
    return _name(found.pop()) if len(found) == 1 else "mixed"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
