"""Detects writes to tensors between a call and its deferred run.

In-place operations increment the version counter. Writes through `.data` do not, so that the address and a few values of each
tensor are compared, too: at once on the CPU, asynchronously on an accelerator, which must not wait (`device_values.py`). Not
covered: writes through `.data` to other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from memfit.engine.device_values import INTEGERS, DeviceValues, bits_of, few_of

Keys = Set[tuple[Any, ...]]
"""Keys of places with state (`composed.Place`)."""
_GATHERED = "has computed the gradients with the loss"
_THROUGH_DATA = "was written through .data, which bumps no version"


class Modified(RuntimeError):
    """A tensor was modified before the computation that needs it ran. Has the message of torch's own error."""

    def __init__(self, variable: str, version: str, when: str) -> None:
        super().__init__(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: [{variable}] "
            f"{version}. (memfit {when}, with the tensors that it was given; do not modify them before backward.)"
        )


def _named(tensor: torch.Tensor) -> str:
    return f"{tensor.type()} {list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class _Held:
    """The state of one tensor."""

    tensor: torch.Tensor
    version: int
    data: torch.Tensor
    """Its data then; shares its storage."""
    lies_at: int
    size: int
    """The bytes of its storage. If it has fewer, its values cannot be read."""
    few: Callable[[], bytes] | None
    """Reads a few of its values; None if they cannot be read, or lie on an accelerator."""
    values: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Held:
        data = tensor.detach()
        if tensor.device.type != "cpu" or not _is_readable(tensor):
            return cls(tensor, tensor._version, data, _lies_at(tensor), 0, None, b"")
        few = _few(data)
        return cls(tensor, tensor._version, data, _lies_at(tensor), data.untyped_storage().nbytes(), few, few())

    @property
    def moved(self) -> bool:
        """Whether its data was assigned."""
        return _lies_at(self.tensor) != self.lies_at

    @property
    def reads_alike(self) -> bool:
        """Whether the old storage has its old values, which is what a graph saved, even if other data was assigned."""
        if self.few is None:
            return True
        return self.data.untyped_storage().nbytes() >= self.size and self.few() == self.values


class Unchanged:
    """The state of tensors at a call. If they were `copied`, writes that increment versions are harmless."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, copied: bool = False) -> None:
        self._tensors, self.copied = [t for t in tensors if not t.is_inference()], copied
        self._note()

    def _note(self) -> None:
        self._held = [_Held.of(t) for t in self._tensors]
        self._accepted: set[int] = set()
        on_device = {i: t for i, t in enumerate(self._tensors) if _is_comparable_on_device(t)}
        self._on_device = DeviceValues.of(on_device)

    @property
    def written(self) -> Keys:
        """Places where an in-place operation wrote or data was assigned."""
        found = [held for held in self._held if held.tensor._version != held.version or held.moved]
        return frozenset(key for held in found for key in _keys_of(held.tensor, held.data))

    def accept(self, moved: Keys) -> None:
        """Accept the current state at these places."""
        for i, held in enumerate(self._held):
            if _is_at(moved, held.tensor, held.data):
                self._held[i] = _Held.of(held.tensor)
                self._accepted.add(i)

    def check(self, when: str, moved: Keys = frozenset()) -> None:
        """Raise Modified if a tensor changed outside these places, as far as the host sees; `when` says why that matters."""
        for held in () if self.copied else self._held:
            tensor = held.tensor
            if moved and _is_at(moved, tensor, held.data):
                continue
            if tensor._version != held.version:
                versions = f"is at version {tensor._version}; expected version {held.version} instead"
                raise Modified(_named(tensor), versions, when)
        self.check_data(when, moved)

    def check_data(self, when: str, moved: Keys = frozenset()) -> None:
        """Raise Modified if a tensor was assigned other data, or one on the host was written without a version increment."""
        for held in self._held:
            if held.moved and not _may_differ(held, moved) and not _same(held.tensor, held.data):
                # Plain backward would read the new data of tensors that autograd saved themselves, as weights of a convolution.
                raise Modified(_named(held.tensor), "got other data through .data", when)
            if not held.reads_alike and not _may_differ(held, moved):
                raise Modified(_named(held.tensor), _THROUGH_DATA, when)

    def check_handed_over(self, moved: Keys = frozenset()) -> None:
        """Raise Modified if a tensor was written without a version increment before its gradients are handed over."""
        self.check_data(_GATHERED, moved)
        self.compare(_GATHERED, moved)

    def compare(self, when: str, moved: Keys = frozenset()) -> None:
        """Start to compare the values of tensors on an accelerator. Raise Modified for one that was written without a version
        increment, in this step or an earlier one."""
        if self._on_device is None:
            return

        def variable(i: int) -> str | None:
            held = self._held[i]
            return None if i in self._accepted or _may_differ(held, moved) else _named(held.tensor)

        self._on_device.compare(variable)
        for found in self._on_device.found_different():
            raise Modified(found, _THROUGH_DATA, f"{when}, in this step or an earlier one")


def _may_differ(held: _Held, moved: Keys) -> bool:
    return held.tensor._version != held.version or _is_at(moved, held.tensor, held.data)


def _same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    if tensor.shape != data.shape or tensor.dtype != data.dtype or tensor.device != data.device:
        return False
    now = tensor.detach()
    if _is_readable(now) and _is_readable(data):  # bit for bit, so that NaN equals itself
        now, data = now.view(INTEGERS[now.itemsize]), data.view(INTEGERS[data.itemsize])
    return torch.equal(now, data)


def _lies_at(tensor: torch.Tensor) -> int:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.data_ptr() if plain and tensor.device.type != "meta" else 0


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_nested or tensor.is_complex() or tensor.is_quantized:
        return False
    return tensor.numel() > 0 and not tensor.is_neg() and not tensor.is_inference()


def _is_comparable_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta") and _is_readable(tensor)


def _few(tensor: torch.Tensor) -> Callable[[], bytes]:
    """Returns a function that reads a few values bit for bit, so that NaN equals itself."""
    values = few_of(tensor)
    # A copy, because storage that NumPy has seen can never be resized again.
    return lambda: bits_of([values]).numpy().tobytes()


def key_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the key of a tensor as the place of its data."""
    return "data", id(tensor)


def _is_at(places: Keys, tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return any(key in places for key in _keys_of(tensor, data))


def _keys_of(tensor: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    yield key_of(tensor)
    if data.layout is torch.strided and not data.is_nested and type(data) in (torch.Tensor, torch.nn.Parameter):
        yield (data.untyped_storage()._cdata,)
