"""Whether tensors are what they were when a call was made that runs later.

Operations in place count versions; writes through `.data` do not, so that a few values of some tensors are remembered as well.
Not covered: writes through `.data` to few values, or on an accelerator, where looking would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WATCHED = 8
"""Tensors whose values are looked at."""
VALUES = 64
"""Values of each."""


class Modified(RuntimeError):
    """A tensor changed before what was to be computed from it ran: torch's own error."""

    def __init__(self, tensor: torch.Tensor, version: str, when: str) -> None:
        super().__init__(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: [{tensor.type()} "
            f"{list(tensor.shape)}] {version}. (memfit {when}, with the tensors that it was given; do not modify them before "
            "backward.)"
        )


class Unchanged:
    """What tensors were."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._versions = [(t, t._version, t.detach()) for t in tensors if not t.is_inference()]
        self._values = [(t, t._version, _some(t)) for t in _spread([t for t in tensors if _is_readable(t)])]

    @property
    def written(self) -> bool:
        """Whether an operation in place wrote any, or data was assigned."""
        return any(tensor._version != version or _lies_at(tensor) != _lies_at(data) for tensor, version, data in self._versions)

    def check(self, when: str) -> None:
        """Raise Modified where one changed; `when` says why that matters."""
        for tensor, version, data in self._versions:
            if tensor._version != version:
                raise Modified(tensor, f"is at version {tensor._version}; expected version {version} instead", when)
            if _lies_at(tensor) != _lies_at(data) and not _same(tensor, data):
                raise Modified(tensor, "was given other data through .data", when)
        self.check_data(when)

    def check_data(self, when: str) -> None:
        """Raise Modified where one was written without counting a version."""
        for tensor, version, values in self._values:
            if tensor._version == version and _is_readable(tensor) and _some(tensor) != values:
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
    return tensor.is_contiguous() and tensor.numel() > 0 and not tensor.is_inference()


def _spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    step = max(1, len(tensors) // WATCHED)
    return tensors[::step][:WATCHED] if len(tensors) > WATCHED else tensors


def _some(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.shape[0] // VALUES)].clone().view(torch.uint8).numpy().tobytes()
