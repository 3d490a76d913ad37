"""Caches results of operators on fake tensors: a repeated call with arguments of the same kind builds its result directly.

A lookup in fake mode's own cache takes ten times as long. Only certain results are cached: new dense tensors, views of a dense
argument, or an argument itself. Not covered: factory functions, and operators whose result depends on values or that change the
shape of an argument; they go to fake mode every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Make = Callable[[list[torch.Tensor]], Any]
"""Builds one result from the tensors among the arguments."""


class Recall:
    """The cache of one fake mode."""

    def __init__(self, mode: Any, fake_type: type) -> None:
        self._mode, self._fake_type = mode, fake_type
        self._made: dict[Any, Make | None] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Returns the result of `func`; `given` are the tensors among its arguments, all of them fakes."""
        key = self._key(func, args, kwargs) if given else None
        if key is None:
            return func(*args, **kwargs)
        make = self._made.get(key)
        if make is not None:
            return make(given)
        out = self._viewed(func, args, given) if func in _VIEWS and not kwargs else func(*args, **kwargs)
        if key not in self._made:
            self._made[key] = self._learnt(out, given) if _is_certain(func) else None
        return out

    def _viewed(self, func: Any, args: Any, given: list[torch.Tensor]) -> Any:
        """The result of a view, computed on the meta tensor below the fake: fake mode takes forty times as long."""
        source: Any = given[0]
        if type(source) is not self._fake_type or not _is_plain(source, self._fake_type):
            return func(*args)
        guard = _no_dispatch()
        try:
            meta = func(*args)
        finally:
            del guard
        fake: Any = self._fake_type
        return fake(self._mode, meta, source.fake_device)

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Everything that determines the kind of the result; None if that is unknown."""
        try:
            named = tuple((name, self._kind(value)) for name, value in kwargs.items()) if kwargs else ()
            kinds = tuple([self._kind(a) for a in args])
            key = (func, kinds, named, torch.get_default_dtype(), torch.is_inference_mode_enabled())
            hash(key)
        except (TypeError, NotImplementedError, RuntimeError):  # symbolic numbers, sparse tensors
            return None
        return key

    def _kind(self, value: Any) -> Any:
        if isinstance(value, self._fake_type):
            tensor: Any = value
            device, offset = tensor.fake_device, tensor.storage_offset()
            return tensor.shape, tensor.stride(), tensor.dtype, device, offset, tensor.is_neg()
        if isinstance(value, (list, tuple)):
            return tuple([self._kind(item) for item in value])
        return type(value), value  # 1, 1.0 and True are equal, but give results of different types

    def _learnt(self, out: Any, given: list[torch.Tensor]) -> Make | None:
        if out is None:
            return lambda given: None
        if isinstance(out, torch.Tensor):
            return self._one(out, given)
        if type(out) not in (tuple, list) or not _apart(out, given):
            return None
        made = [self._learnt(item, given) if item is None or isinstance(item, torch.Tensor) else None for item in out]
        known = [make for make in made if make is not None]
        kind = type(out)
        return None if len(known) != len(made) else lambda given: kind([make(given) for make in known])

    def _one(self, out: torch.Tensor, given: list[torch.Tensor]) -> Make | None:
        same = next((i for i, t in enumerate(given) if t is out), None)
        if same is not None:
            return lambda given: given[same]
        if not _is_plain(out, self._fake_type) or any(not _is_plain(t, self._fake_type) for t in given):
            return None
        fake: Any = out
        shape, stride, dtype, device = tuple(out.shape), out.stride(), out.dtype, fake.fake_device
        base = next((i for i, t in enumerate(given) if _storage(t) == _storage(out)), None)
        if base is not None:
            offset = int(out.storage_offset())
            return None if given[base].dtype is not dtype else self._view(base, shape, stride, offset, device)
        if out.storage_offset() or out.untyped_storage().nbytes() != _dense_bytes(shape, stride, dtype):
            return None
        return self._fresh(shape, stride, dtype, device)

    def _fresh(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Make:
        mode, fake_type = self._mode, self._fake_type

        def make(given: list[torch.Tensor]) -> torch.Tensor:
            guard = _no_dispatch()
            try:
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            finally:
                del guard
            return fake_type(mode, meta, device)

        return make

    def _view(
        self, base: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, device: torch.device
    ) -> Make:
        mode, fake_type = self._mode, self._fake_type

        def make(given: list[torch.Tensor]) -> torch.Tensor:
            source = given[base]
            guard = _no_dispatch()
            try:
                meta = torch.empty(0, dtype=source.dtype, device="meta")
                meta.set_(source.untyped_storage(), offset, shape, stride)  # pyright: ignore[reportArgumentType]
            finally:
                del guard
            return fake_type(mode, meta, device)

        return make


_no_dispatch = torch._C._DisableTorchDispatch  # pyright: ignore[reportAttributeAccessIssue]

_aten = torch.ops.aten
_VIEWS = frozenset(
    (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.expand.default,
        _aten.unsqueeze.default,
        _aten.select.int,
        _aten.slice.Tensor,
    )
)
"""Operators that return a view of their first argument, the same view on every device."""

_UNCERTAIN = (
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
)


def _is_certain(func: Any) -> bool:
    """Whether the kinds of an operator's arguments determine the kind of its result, and do not change."""
    schema = getattr(func, "_schema", None)
    if schema is None or not str(schema).startswith("aten::") or any(tag in func.tags for tag in _UNCERTAIN):
        return False
    return "lift" not in schema.name and not any(a.kwarg_only and a.is_write for a in schema.arguments)


def _is_plain(tensor: Any, fake_type: type) -> bool:
    """Whether shape, strides and dtype describe a tensor completely."""
    if type(tensor) is not fake_type and not isinstance(tensor, torch.nn.Parameter):
        return False
    if tensor.layout is not torch.strided or tensor.dtype.is_complex or tensor.is_quantized:
        return False
    return getattr(tensor, "constant", None) is None and not tensor.is_neg()


def _apart(out: Sequence[Any], given: list[torch.Tensor]) -> bool:
    """Whether no two of these results share memory, other than an argument's."""
    theirs = {_storage(t) for t in given}
    own = [_storage(t) for t in out if isinstance(t, torch.Tensor) and _storage(t) not in theirs]
    return len(own) == len(set(own))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _dense_bytes(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride))) * dtype.itemsize
