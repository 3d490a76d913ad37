"""Whether what micro-batches leave or return alike is the same in all of them. A proof's samples may not have shown that it
depends on them (a statistic that is 0 for few)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from memfit._errors import Refused
from memfit.engine.branches import Act, Made, MovedPlace
from memfit.engine.device_values import few_of, read_later
from memfit.hardware.clock import has_events

ENTRIES = 4096
"""Entries up to which all are compared; of larger tensors, a few are."""
APART = {torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Relative L2 difference above which tensors are not the same, by dtype; 1e-3 for others. Kernels with atomic additions do not
repeat to the bit."""
CLOSE = 1e-3


class BatchDependent(Refused):
    """Raised if something is not the same in all micro-batches, or not 0, as it was where it was proven."""

    differing: frozenset[Act] = frozenset()
    """What only some micro-batches did."""

    @classmethod
    def of(cls, name: str) -> BatchDependent:
        """Return the error for something of this name."""
        return cls(
            "running a call of the model in micro-batches",
            found=f"{name} is not the same in all of them, as it was where it was proven: it depends on the samples, or is "
            "drawn",
            next_move="return it with one entry per sample, or compute it outside the model",
        )

    @classmethod
    def of_number(cls, name: str) -> BatchDependent:
        """Return the error for a number that other calls moved while this one waited, so that it does something else now."""
        return cls(
            "running a call of the model in micro-batches",
            found=f"an earlier call moves {name}, which decides what this one does",
            next_move="update it outside the forward, or give it a budget in which the batch runs whole",
        )

    @classmethod
    def of_branch(cls, line: str, differing: Collection[Made]) -> BatchDependent:
        """Return the error for a line that does not do the same in all micro-batches, where these calls are made."""
        made = cls(
            "running a call of the model in micro-batches",
            found=f"{line} does not do the same in all of them, and branches on values of the batch",
            next_move="use a mask, branch outside the model, or give it a budget in which the batch runs whole",
        )
        made.differing = frozenset(differing)
        return made

    @classmethod
    def of_moves(cls, label: str, keys: Collection[tuple[Any, ...]]) -> BatchDependent:
        """Return the error for state that no proof has seen move, at places with these keys, one of which has this label."""
        made = cls(
            "running a call of the model in micro-batches",
            found=f"the forward moves {label} on some batches only",
            next_move="update it outside the forward, or give it a budget in which the batch runs whole",
        )
        made.differing = frozenset(map(MovedPlace, keys))
        return made

    @classmethod
    def of_loss(cls, changed: str) -> BatchDependent:
        """Return the error for a loss that is no longer as it was proven."""
        return cls(
            "running a call of the model in micro-batches",
            found=f"its loss is not made as it was where it was proven: {changed}",
            next_move="compute that term outside the model, or give it a budget in which the batch runs whole",
        )


def check_same(first: Any, other: Any, name: Callable[[], str]) -> None:
    """Raise BatchDependent if two values differ: numbers, texts, tensors, sizes of lists. Others count as the same. Tensors on
    an accelerator are compared there, and the error is raised where its result has arrived
    (`device_values.found_different`)."""
    if _is_plain(first) and _is_plain(other):
        _check_tensors(first.detach(), other.detach(), name)
    elif _numbers_differ(first, other) or _sizes_differ(first, other):
        raise BatchDependent.of(name())


def _sizes_differ(first: Any, other: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        return first.shape != other.shape
    lists = (list, tuple, dict)
    return isinstance(first, lists) and isinstance(other, lists) and len(first) != len(other)


def _check_tensors(first: torch.Tensor, other: torch.Tensor, name: Callable[[], str]) -> None:
    if _is_one(first, other):
        return
    differs, device = differ(first, other), other.device
    if device.type == "cpu":
        if differs:
            raise BatchDependent.of(name())
    elif has_events(device):
        read_later(lambda: BatchDependent.of(name()), differs)


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose values can be read: not a sharded parameter, which is freed after a forward."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return False
    if value.is_nested or value.is_quantized or value.device.type == "meta" or not value.numel():
        return False
    return value.untyped_storage().nbytes() > 0


def _is_one(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same memory: a parameter or a buffer."""
    if first is other:
        return True
    return first.shape == other.shape and first.stride() == other.stride() and first.data_ptr() == other.data_ptr()


def differ(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether two tensors differ, on their device."""
    if first.shape != other.shape or first.dtype != other.dtype or first.device != other.device:
        return torch.ones((), dtype=torch.bool, device=other.device)
    if other.numel() > ENTRIES:
        first, other = few_of(first), few_of(other)
    if not (other.is_floating_point() or other.is_complex()):
        return (first != other).any()
    same = (first == other) | (first.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (first - other).abs()).norm()
    return ~(gap <= APART.get(other.dtype, CLOSE) * torch.where(first.isfinite(), first, 0.0).norm())


def _numbers_differ(first: Any, other: Any) -> bool:
    if isinstance(first, float) or isinstance(other, float):
        if not (isinstance(first, (int, float)) and isinstance(other, (int, float))):
            return False
        return not (first == other or math.isclose(first, other, rel_tol=CLOSE) or (math.isnan(first) and math.isnan(other)))
    simple = (bool, int, str, type(None))
    return isinstance(first, simple) and isinstance(other, simple) and first != other
