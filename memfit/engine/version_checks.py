"""Detects writes to tensors between a call and its deferred run.

In-place operations increment the version counter. Writes through `.data` do not, so that the address and a few values of each
tensor are compared, too: at once on the CPU, asynchronously on an accelerator, which must not wait (`device_values.py`). Not
covered: writes through `.data` to other values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit._errors import Refused
from memfit.engine.device_values import INTEGERS, DeviceValues, bits_of, few_of

Keys = Set[tuple[Any, ...]]
"""Keys of places with state (`places.Place`)."""
_GATHERED = "handing over gradients that were computed with the loss"
_THROUGH_DATA = "was written through .data, which bumps no version"


class Modified(Refused):
    """A tensor was modified before the computation that needs it ran. Has the message of torch's own error."""

    @classmethod
    def of(cls, variable: str, version: str, when: str) -> Modified:
        """Return the error for a tensor at such a version."""
        return cls(
            when,
            found="one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{variable}] {version}",
            next_move="modify it after backward, or pass a copy to the model",
        )


def named(tensor: torch.Tensor) -> str:
    """Return the type and shape of a tensor, as torch's own error names it."""
    return f"{tensor.type()} {list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class _Held:
    """The state of one tensor."""

    tensor: torch.Tensor
    version: int
    data: torch.Tensor
    """Its data then; shares its storage."""
    lies_at: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Held:
        return cls(tensor, tensor._version, tensor.detach(), _lies_at(tensor))

    @property
    def moved(self) -> bool:
        """Whether its data was assigned."""
        return _lies_at(self.tensor) != self.lies_at


class _HostValues:
    """A few values of tensors on the host, by index, as they are now. What lies in their old storage counts, which is what a
    graph saved, even if other data was assigned."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        few: dict[torch.dtype, dict[int, torch.Tensor]] = defaultdict(dict)
        for i, tensor in tensors.items():
            few[tensor.dtype][i] = few_of(tensor)
        # Copies, because storage that NumPy has seen can never be resized again.
        self._few = [(each, bits_of(each.values()).numpy()) for each in few.values()]
        storages = [(i, tensor.untyped_storage()) for i, tensor in tensors.items()]
        self._sizes = [(i, storage, storage.nbytes()) for i, storage in storages]
        self._dropped: set[int] = set()

    def drop(self, indices: Set[int]) -> None:
        """Compare these no longer."""
        self._dropped |= indices

    def differing(self) -> set[int]:
        """Return which differ. Storage that has become smaller cannot be read."""
        smaller = {i for i, storage, size in self._sizes if storage.nbytes() < size}
        found = set(smaller)
        for few, before in self._few:
            if smaller.isdisjoint(few) and (bits_of(few.values()).numpy() == before).all():
                continue
            start = 0
            for i, values in few.items():
                stop = start + values.numel()
                if i not in smaller and (bits_of([values]).numpy() != before[start:stop]).any():
                    found.add(i)
                start = stop
        return found - self._dropped


class Unchanged:
    """The state of tensors at a call. If they were `copied`, writes that increment versions are harmless."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, copied: bool = False) -> None:
        self.tensors, self.copied = [t for t in tensors if not t.is_inference()], copied
        self._note()

    def _note(self) -> None:
        self._held = [_Held.of(t) for t in self.tensors]
        self._accepted: set[int] = set()
        on_host = {i: held.data for i, held in enumerate(self._held) if self._is_on_host(i)}
        self._on_host = [_HostValues(on_host)]
        on_device = {i: t for i, t in enumerate(self.tensors) if t.device.type not in ("cpu", "meta") and _is_readable(t)}
        self._on_device = DeviceValues.of(on_device)

    @property
    def written(self) -> Keys:
        """Places where an in-place operation wrote or data was assigned."""
        found = [held for held in self._held if held.tensor._version != held.version or held.moved]
        return frozenset(key for held in found for key in keys_of_values(held.tensor, held.data))

    def accept(self, moved: Keys) -> None:
        """Accept the current state at these places."""
        accepted = {i for i, held in enumerate(self._held) if _is_at(moved, held.tensor, held.data)}
        for i in accepted:
            self._held[i] = _Held.of(self._held[i].tensor)
        for values in self._on_host if accepted else ():
            values.drop(accepted)
        self._accepted |= accepted
        again = {i: self._held[i].data for i in accepted if self._is_on_host(i)}
        if again:
            self._on_host.append(_HostValues(again))

    def _is_on_host(self, index: int) -> bool:
        return self._held[index].data.device.type == "cpu" and _is_readable(self._held[index].tensor)

    def check(self, when: str, moved: Keys = frozenset()) -> None:
        """Raise Modified if a tensor changed outside these places, as far as the host sees; `when` says why that matters."""
        for held in () if self.copied else self._held:
            tensor = held.tensor
            if moved and _is_at(moved, tensor, held.data):
                continue
            if tensor._version != held.version:
                versions = f"is at version {tensor._version}; expected version {held.version} instead"
                raise Modified.of(named(tensor), versions, when)
        self.check_data(when, moved)

    def check_data(self, when: str, moved: Keys = frozenset()) -> None:
        """Raise Modified if a tensor was assigned other data, or one on the host was written without a version increment."""
        differing = set[int]().union(*(values.differing() for values in self._on_host))
        for i, held in enumerate(self._held):
            if held.moved and not _may_differ(held, moved) and not _same(held.tensor, held.data):
                # Plain backward would read the new data of tensors that autograd saved themselves, as weights of a convolution.
                raise Modified.of(named(held.tensor), "got other data through .data", when)
            if i in differing and not _may_differ(held, moved):
                raise Modified.of(named(held.tensor), _THROUGH_DATA, when)

    def check_handed_over(self, moved: Keys = frozenset()) -> None:
        """Raise Modified if a tensor was written without a version increment before its gradients are handed over."""
        self.check_data(_GATHERED, moved)
        self.compare(_GATHERED, moved)

    def compare(self, when: str, moved: Keys = frozenset()) -> None:
        """Start to compare the values of tensors on an accelerator. Raise Modified for one that was written without a version
        increment, in this step or an earlier one."""
        if self._on_device is None:
            return

        def error_of(i: int) -> Callable[[], Modified] | None:
            held = self._held[i]
            if i in self._accepted or _may_differ(held, moved):
                return None
            return partial(Modified.of, named(held.tensor), _THROUGH_DATA, f"{when}, in this step or an earlier one")

        self._on_device.compare(error_of)
        for error in self._on_device.found_different():
            raise error


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


def key_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the key of a tensor as the place of its data."""
    return "data", id(tensor)


def _is_at(places: Keys, tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return any(key in places for key in keys_of_values(tensor, data))


def keys_of_values(tensor: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of the places that hold the values of a tensor, whose data was `data`."""
    yield key_of(tensor)
    if data.layout is torch.strided and not data.is_nested and type(data) in (torch.Tensor, torch.nn.Parameter):
        yield (data.untyped_storage()._cdata,)
