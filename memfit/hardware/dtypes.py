"""In which precisions a device computes at least as fast as in float32, from what it says about itself.

Not covered: measured speed (small matrices may be slower in half precision all the same), processors other than x86.
"""

from __future__ import annotations

import platform
from typing import Any


def cpu_facts(proc: str = "/proc") -> tuple[str, frozenset[str]]:
    """The processor's name and the flags of its instruction sets."""
    fields: dict[str, str] = {}
    try:
        with open(f"{proc}/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
                if "model name" in fields and "flags" in fields:
                    break  # every further core repeats them
    except (OSError, ValueError):
        pass
    flags = frozenset(fields["flags"].split()) if "flags" in fields else _torch_flags()
    return fields.get("model name") or platform.processor() or platform.machine() or "CPU", flags


def _torch_flags() -> frozenset[str]:
    """The instruction sets torch knows of, where the system has no list."""
    import torch

    known = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10
    return frozenset(name for name, has in known.items() if has is True)


def cpu_fast_dtypes(flags: frozenset[str]) -> tuple[str, ...]:
    """Without instructions of its own, bfloat16 is converted back and forth and slower than float32."""
    return ("float32", "bfloat16") if flags & {"avx512_bf16", "amx_bf16"} else ("float32",)


def hip_build() -> bool:
    """Whether this torch was built for ROCm, where capabilities mean something else."""
    import torch

    return torch.version.hip is not None


def cuda_fast_dtypes(capability: tuple[int, int], rocm: str = "") -> tuple[str, ...]:
    """By compute capability: float16 since Volta, bfloat16 since Ampere. On ROCm by the architecture's name."""
    if rocm:
        matrix_units = rocm.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))
        return ("float32", "bfloat16", "float16") if matrix_units else ("float32", "float16")
    if capability >= (8, 0):
        return ("float32", "bfloat16", "float16")
    return ("float32", "float16") if capability >= (7, 0) else ("float32",)


def xpu_fast_dtypes(properties: Any) -> tuple[str, ...]:
    """Half precision pays where the device has matrix engines."""
    if getattr(properties, "has_subgroup_matrix_multiply_accumulate", False):
        return ("float32", "bfloat16", "float16")
    return ("float32", "float16") if getattr(properties, "has_fp16", False) else ("float32",)
