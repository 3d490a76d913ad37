"""Determines the dtypes in which a device computes at least as fast as in float32, from its own description.

Not covered: measured speed (small matrices may still be slower in half precision), processors other than x86.
"""

from __future__ import annotations

import platform
from typing import Any


def cpu_facts(proc: str = "/proc") -> tuple[str, frozenset[str]]:
    """Return the processor's name and its instruction set flags."""
    fields: dict[str, str] = {}
    try:
        with open(f"{proc}/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
                if "model name" in fields and "flags" in fields:
                    break  # every other core repeats them
    except (OSError, ValueError):
        pass
    flags = frozenset(fields["flags"].split()) if "flags" in fields else _torch_flags()
    return fields.get("model name") or platform.processor() or platform.machine() or "CPU", flags


def _torch_flags() -> frozenset[str]:
    """Return the instruction sets that torch detects, for systems without a list."""
    import torch

    known = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10
    return frozenset(name for name, has in known.items() if has is True)


def cpu_fast_dtypes(flags: frozenset[str]) -> tuple[str, ...]:
    """Fast dtypes of a CPU. Without native instructions, bfloat16 is converted back and forth and slower than float32."""
    return ("float32", "bfloat16") if flags & {"avx512_bf16", "amx_bf16"} else ("float32",)


def hip_build() -> bool:
    """Whether this torch is built for ROCm, where capabilities have another meaning."""
    import torch

    return torch.version.hip is not None


def cuda_fast_dtypes(capability: tuple[int, int], rocm: str = "") -> tuple[str, ...]:
    """Fast dtypes by compute capability: float16 since Volta, bfloat16 since Ampere. On ROCm, by architecture name."""
    if rocm:
        matrix_units = rocm.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))
        return ("float32", "bfloat16", "float16") if matrix_units else ("float32", "float16")
    if capability >= (8, 0):
        return ("float32", "bfloat16", "float16")
    return ("float32", "float16") if capability >= (7, 0) else ("float32",)


def xpu_fast_dtypes(properties: Any) -> tuple[str, ...]:
    """Fast dtypes of an XPU. Half precision pays off if the device has matrix engines."""
    if getattr(properties, "has_subgroup_matrix_multiply_accumulate", False):
        return ("float32", "bfloat16", "float16")
    return ("float32", "float16") if getattr(properties, "has_fp16", False) else ("float32",)
