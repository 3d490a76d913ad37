"""The device a step is traced for, where it is not the one the tensors are on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A GPU, as far as the choice of kernels depends on it."""

    capability: tuple[int, int]
    """Compute capability, or what comes nearest to it on another vendor's device."""
    kind: str = "cuda"
    """The device type that scripts name."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether fused kernels compute in bfloat16."""
        return self.capability >= (8, 0)
