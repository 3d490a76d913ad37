"""What planning writes into tensors that were there before is copied before the first write, and written back afterwards.

A dispatch mode sees every operator below autograd, whoever holds the tensor that is written (a module, a closure, a list), and
by whichever alias (`.data`, a view, a detached tensor): what counts is the storage. Contents go back into the same storage, so
that addresses and identities stay valid. Not covered: writes past the dispatcher (NumPy arrays over a tensor's memory,
extensions that are no operators), and parameters that several processes hold in parts.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as _KeptVersion
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine.context import uncompiled

_STATISTICS = ("running_mean", "running_var")
_UNSAID = {
    f"aten::{name}": _STATISTICS
    for name in (
        "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
}  # fmt: skip
"""Operators that write arguments without saying so in their schemas (torch 2.13, RegistrationDeclarations.h)."""
_METADATA = ("aten::record_stream", "aten::detach_", "aten::requires_grad_", "aten::_assert_async")
"""Operators whose schemas say that they write, and that leave the contents alone."""
_Geometry = tuple[torch.dtype, int, Sequence[int], Sequence[int]]
"""Data type, offset, shape and strides of a tensor, by elements."""


class UndoLog:
    """Contents and versions of what was written since it began."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage, _Geometry]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}  # (held: `p.detach()` may be all that has p's counter)

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Keep what is there, the first time."""
        storage = storage_of(tensor)
        if storage is None:
            return
        if storage._cdata not in self._copies:
            # (held, so that no other comes to its address)
            self._copies[storage._cdata] = storage, storage.clone(), _geometry(tensor, storage)
        counted = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if id(counted) not in self._versions and not counted.is_inference():
            self._versions[id(counted)] = counted, counted._version

    def moved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(a tensor, what it held before) for what was written and is not the same. What nobody else holds was made meanwhile,
        past the dispatcher (`copy.deepcopy`)."""
        held = Counter(tensor.untyped_storage()._cdata for tensor, _ in self._versions.values())
        return [
            (_tensor_on(storage, geometry), _tensor_on(copy, geometry))
            for storage, copy, geometry in self._copies.values()
            if storage.nbytes() == copy.nbytes()
            and torch._C._storage_Use_Count(storage._cdata) > 1 + held[storage._cdata]
            and not torch.equal(_bytes_of(storage), _bytes_of(copy))
        ]

    def undo(self) -> None:
        """Let everything be as it was. Versions too: graphs of the script's own may have saved these tensors."""
        for storage, copy, _ in self._copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for tensor, version in reversed(self._versions.values()):
            _set_version(tensor, version)
        self._copies, self._versions = {}, {}


class WriteGuard(TorchDispatchMode):
    """Tells `log` of every write to a storage that no operator has made since the guard began."""

    supports_higher_order_operators = True  # they run as they are; what they consist of comes here by itself

    def __init__(self, log: UndoLog) -> None:
        super().__init__()
        self._log = log
        self._new: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports dynamo

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        places, makes = _known(func)
        for index, name in places:
            self._look(args[index] if index < len(args) else kwargs.get(name))
        out = func(*args, **kwargs)
        if makes:
            self._note(out)
        return out

    def _look(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self._new:
                self._log.about_to_write(tensor)

    def _note(self, out: Any) -> None:
        for item in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(item, (list, tuple)):
                self._note(item)
            elif (storage := storage_of(item)) is not None:
                self._new.add(storage._cdata)


@contextmanager
def writes_undone(*, watching: bool = True) -> Iterator[UndoLog]:
    """Inside, tensors may be written; afterwards all of them are as they were. With `watching`, whatever is written; without,
    what `watched` saw: timings run without a mode, which takes some microseconds per operator."""
    log = UndoLog()
    try:
        with watched(log) if watching else nullcontext():
            yield log
    finally:
        log.undo()


@contextmanager
def watched(log: UndoLog) -> Iterator[None]:
    """Inside, writes are noted in a log that somebody else undoes. Nothing is compiled: dynamo would trace into the mode."""
    with uncompiled(), WriteGuard(log):
        yield


def storage_of(tensor: Any) -> torch.UntypedStorage | None:
    """Where a tensor's data lies; None for what has none of its own (fake, meta, sparse, nested, in parts)."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    if hasattr(tensor, "to_local") or tensor.is_nested:
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # wrapper subclasses
        return None
    return None if storage.device.type == "meta" else storage


def _geometry(tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Geometry:
    """That of the tensor that was written if it is all that its storage holds, else of the storage's bytes."""
    for found in (tensor, tensor._base):
        if found is not None and found.numel() * found.element_size() == storage.nbytes():
            return found.dtype, int(found.storage_offset()), found.size(), found.stride()
    return torch.uint8, 0, (storage.nbytes(),), (1,)


def _tensor_on(storage: torch.UntypedStorage, geometry: _Geometry) -> torch.Tensor:
    dtype, *place = geometry
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)  # pyright: ignore


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


def _set_version(tensor: torch.Tensor, version: int) -> None:
    kept = _KeptVersion(tensor)
    if hasattr(kept, "prev_versions"):  # torch 2.5
        kept.prev_versions = (version,)
    else:
        kept.prev_version = version  # type: ignore[attr-defined]
    kept.__exit__()


@functools.cache
def _known(func: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """((place, name) of the arguments that an operator writes, whether its results lie in storages of their own)."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher order operator: what it consists of comes by itself
        return (), False
    makes = schema.name == "aten::lift_fresh" or all(result.alias_info is None for result in schema.returns)
    everything = tuple((i, argument.name) for i, argument in enumerate(schema.arguments))
    if schema.name.startswith("c10d::"):  # whose schemas say nothing
        return everything, False
    unsaid = _UNSAID.get(schema.name, ())
    said = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if schema.name in _METADATA:
        said = set()
    return tuple((i, name) for i, name in everything if name in said or name in unsaid), makes
