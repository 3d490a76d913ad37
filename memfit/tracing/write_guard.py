"""Undoes what planning writes to existing tensors: contents are copied before the first write, and copied back afterwards.

A dispatch mode sees every operator below autograd, whatever holds the written tensor (a module, a closure, a list) and
whichever alias is written (`.data`, a view, a detached tensor): copies are made per storage. Contents go back into the same
storage, so addresses and identities stay valid. Not covered: writes that bypass the dispatcher (NumPy arrays over a tensor's
memory, extensions that are no operators), and parameters sharded over several processes.
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

from memfit.engine.call_context import uncompiled

_STATISTICS = ("running_mean", "running_var")
_UNSAID = {
    f"aten::{name}": _STATISTICS
    for name in (
        "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
}  # fmt: skip
"""Operators that write arguments without declaring it in their schemas (torch 2.13, RegistrationDeclarations.h)."""
_METADATA = ("aten::record_stream", "aten::detach_", "aten::requires_grad_", "aten::_assert_async")
"""Operators whose schemas declare a write, but which do not change the contents."""
_Geometry = tuple[torch.dtype, int, Sequence[int], Sequence[int]]
"""Dtype, storage offset, shape and strides of a tensor, in elements."""


class UndoLog:
    """The original contents and versions of tensors written since the log began."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage, _Geometry]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}  # (held: `p.detach()` may be all that shares p's counter)

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Saves contents and version before the first write."""
        storage = storage_of(tensor)
        if storage is None:
            return
        if storage._cdata not in self._copies:
            # (held, so that no other storage reuses its address)
            self._copies[storage._cdata] = storage, _copy_of(storage), _geometry(tensor, storage)
        counted = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if id(counted) not in self._versions and not counted.is_inference():
            self._versions[id(counted)] = counted, counted._version

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (tensor, previous contents) for whatever was written, with other or the same values: a clamp may bite later,
        and a graph that has saved the tensor sees a newer version. Storages that nobody else holds are left out: they were
        created after the log began, past the dispatcher (`copy.deepcopy`)."""
        held = Counter(tensor.untyped_storage()._cdata for tensor, _ in self._versions.values())
        return [
            (_tensor_on(storage, geometry), _tensor_on(copy, geometry))
            for storage, copy, geometry in self._copies.values()
            if storage.nbytes() == copy.nbytes() and torch._C._storage_Use_Count(storage._cdata) > 1 + held[storage._cdata]
        ]

    def rewind(self) -> None:
        """Restores all contents, and goes on."""
        for storage, copy, _ in self._copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)

    def undo(self) -> None:
        """Restores all contents and versions: autograd graphs of the script may have saved these tensors at that version."""
        self.rewind()
        for tensor, version in reversed(self._versions.values()):
            _set_version(tensor, version)
        self._copies, self._versions = {}, {}


class WriteGuard(TorchDispatchMode):
    """Reports every write to `log`, except to storages that an operator has created since the guard began."""

    supports_higher_order_operators = True  # they run unchanged; the operators inside them are dispatched here

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
    """Undoes writes to tensors on exit: with `watching`, every write; without it, those that `watched` recorded. Timed runs use
    no dispatch mode, because a mode takes some microseconds per operator."""
    log = UndoLog()
    try:
        with watched(log) if watching else nullcontext():
            yield log
    finally:
        log.undo()


@contextmanager
def watched(log: UndoLog) -> Iterator[None]:
    """Records writes in a log that the caller undoes. Nothing is compiled inside, because dynamo would trace into the mode."""
    with uncompiled(), WriteGuard(log):
        yield


def storage_of(tensor: Any) -> torch.UntypedStorage | None:
    """Returns the storage of a tensor; None if it has none of its own (fake, meta, sparse, nested, sharded)."""
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
    """Geometry of the written tensor or its base if it covers the whole storage, else of the storage's bytes."""
    for found in (tensor, tensor._base):
        if found is not None and found.numel() * found.element_size() == storage.nbytes():
            return found.dtype, int(found.storage_offset()), found.size(), found.stride()
    return _bytes_of(storage)


def _bytes_of(storage: torch.UntypedStorage) -> _Geometry:
    return torch.uint8, 0, (storage.nbytes(),), (1,)


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Returns a copy, made by an operator that creates it: for the guard around this one, `storage.clone()` is a write to a
    storage that it has never seen, and it would undo that write."""
    return _tensor_on(storage, _bytes_of(storage)).clone().untyped_storage()


def _tensor_on(storage: torch.UntypedStorage, geometry: _Geometry) -> torch.Tensor:
    dtype, *place = geometry
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)  # pyright: ignore


def _set_version(tensor: torch.Tensor, version: int) -> None:
    kept = _KeptVersion(tensor)
    if hasattr(kept, "prev_versions"):  # torch 2.5
        kept.prev_versions = (version,)
    else:
        kept.prev_version = version  # type: ignore[attr-defined]
    kept.__exit__()


@functools.cache
def _known(func: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """((index, name) of the arguments that an operator writes, whether its results have new storages)."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: the operators inside it are dispatched separately
        return (), False
    makes = schema.name == "aten::lift_fresh" or all(result.alias_info is None for result in schema.returns)
    everything = tuple((i, argument.name) for i, argument in enumerate(schema.arguments))
    if schema.name.startswith("c10d::"):  # their schemas declare no writes
        return everything, False
    unsaid = _UNSAID.get(schema.name, ())
    said = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if schema.name in _METADATA:
        said = set()
    return tuple((i, name) for i, name in everything if name in said or name in unsaid), makes
