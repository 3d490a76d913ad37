"""Whether tensors are what they were when a call was made that runs later.

Operations in place count versions; writes through `.data` do not, so that a few values of each tensor are remembered as well.
Not covered: writes through `.data` to few values, or on an accelerator, where looking would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch

Keys = Set[tuple[Any, ...]]
"""Keys of places where state lies (`composed.Place`)."""
VALUES = 16
"""Values of each tensor that are looked at."""


class Modified(RuntimeError):
    """A tensor changed before what was to be computed from it ran: torch's own error."""

    def __init__(self, tensor: torch.Tensor, version: str, when: str) -> None:
        super().__init__(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: [{tensor.type()} "
            f"{list(tensor.shape)}] {version}. (memfit {when}, with the tensors that it was given; do not modify them before "
            "backward.)"
        )


class Unchanged:
    """What tensors were. Where they were `copied`, writes that count versions do no harm."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, copied: bool = False) -> None:
        self._tensors, self.copied = [t for t in tensors if not t.is_inference()], copied
        self._note()

    def _note(self) -> None:
        self._versions = [(t, t._version, t.detach()) for t in self._tensors]
        readable = [t for t in self._tensors if _is_readable(t)]
        self._values = [(its, [t._version for t in its], _some(its)) for its in _by_dtype(readable)]

    @property
    def written(self) -> bool:
        """Whether an operation in place wrote any, or data was assigned."""
        return any(tensor._version != version or _lies_at(tensor) != _lies_at(data) for tensor, version, data in self._versions)

    def accept(self, moved: Keys) -> None:
        """What is at these places may be what it is now."""
        if moved and any(_is_at(moved, tensor, data) for tensor, _, data in self._versions):
            self._note()

    def check(self, when: str, moved: Keys = frozenset()) -> None:
        """Raise Modified where one changed that is at none of these places; `when` says why that matters."""
        for tensor, version, data in () if self.copied else self._versions:
            if moved and _is_at(moved, tensor, data):
                continue
            if tensor._version != version:
                raise Modified(tensor, f"is at version {tensor._version}; expected version {version} instead", when)
            if _lies_at(tensor) != _lies_at(data) and not _same(tensor, data):
                raise Modified(tensor, "was given other data through .data", when)
        self.check_data(when, moved)

    def check_data(self, when: str, moved: Keys = frozenset()) -> None:
        """Raise Modified where one was written without counting a version."""
        for tensors, versions, values in self._values:
            if all(map(_is_readable, tensors)) and _alike(_some(tensors), values):
                continue
            for tensor, version, kept in zip(tensors, versions, values.split([_count(t) for t in tensors])):
                same = tensor._version != version or not _is_readable(tensor) or _alike(_some([tensor]), kept)
                if not same and not _is_at(moved, tensor, tensor):
                    raise Modified(tensor, "was written through .data, which counts no version", when)


def _same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    alike = tensor.shape == data.shape and tensor.dtype == data.dtype and tensor.device == data.device
    return alike and torch.equal(tensor.detach(), data)


def _lies_at(tensor: torch.Tensor) -> int:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.data_ptr() if plain and tensor.device.type != "meta" else 0


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.is_nested or tensor.is_complex():
        return False
    return tensor.numel() > 0 and not tensor.is_inference()


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _some(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A few values of each tensor, one after the other."""
    return torch.cat([_entries(t.detach(), _stride(t)) for t in tensors])


def _entries(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """Every so many of its entries."""
    if tensor.is_contiguous():
        return tensor.view(-1)[::stride]
    places = np.unravel_index(np.arange(0, tensor.numel(), stride), tensor.shape)
    return tensor[tuple(map(torch.from_numpy, places))]


def _stride(tensor: torch.Tensor) -> int:
    return max(1, tensor.numel() // VALUES)


def _count(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() // _stride(tensor))


def _alike(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Bit for bit: NaN is equal to itself. (Both are on the host; torch's own comparison would count as a wait.)"""
    return some.shape == others.shape and _bytes_of(some) == _bytes_of(others)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def _is_at(places: Keys, tensor: torch.Tensor, data: torch.Tensor) -> bool:
    plain = data.layout is torch.strided and not data.is_nested and type(data) in (torch.Tensor, torch.nn.Parameter)
    return ("data", id(tensor)) in places or (plain and (data.untyped_storage()._cdata,) in places)
