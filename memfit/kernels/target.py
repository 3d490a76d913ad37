"""The GPU that a step is traced for, if it is not the device the tensors are on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Describes a GPU as far as the choice of kernels depends on it."""

    capability: tuple[int, int]
    """Compute capability, or its nearest equivalent on another vendor's device."""
    kind: str = "cuda"
    """The device type that scripts use."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether fused kernels compute in bfloat16."""
        return self.capability >= (8, 0)
