"""The usual way from a model's output to its loss: views, slices and per-sample arithmetic that need not run yet.

Each understood operation says where the samples lie in its result and how its arguments change for a micro-batch (views hold
whole-batch sizes as plain numbers). Anything not listed here, or that moves samples in a way one axis cannot describe, makes
the output materialise by replay. Not covered: arithmetic with other tensors, indexing along the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from memfit.batches.cut import Axis
from memfit.engine.context import Autocast, autocast_now, autocasting

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """One operation on the way, for any number of samples."""

    function: Callable[..., Any]
    """The torch function; its first argument is what the way has made so far."""
    arguments: Callable[[int], Arguments]
    """From a number of samples to the remaining arguments."""
    axis: Axis
    """Where the samples lie in the result."""
    autocast: tuple[Autocast, ...] = ()
    """The autocast states it was called under."""

    def apply(self, value: torch.Tensor, samples: int) -> torch.Tensor:
        """The operation on the output of a micro-batch of `samples`."""
        rest, kwargs = self.arguments(samples)
        with autocasting(self.autocast):
            return self.function(value, *rest, **kwargs)


def step(
    function: Any, shape: tuple[int, ...], axis: Axis, rest: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Step | None:
    """`function(x, *rest, **kwargs)` for an x of `shape` whose samples lie along `axis`; None if it is not understood."""
    if _holds_tensor((*rest, *kwargs.values())):
        return None
    rule = _RULES.get(function)
    found = None if rule is None else rule(function, shape, axis, rest, kwargs)
    return None if found is None else replace(found, autocast=autocast_now((device.type, "cpu")))


def _pointwise(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    if not all(isinstance(a, (int, float, bool, torch.dtype, type(None))) for a in (*rest, *kwargs.values())):
        return None
    return Step(function, lambda n: (rest, kwargs), axis)


def _cast(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    allowed = (torch.dtype, bool, type(None))
    if function is torch.Tensor.to and not all(isinstance(a, allowed) for a in (*rest, *kwargs.values())):
        return None  # to another device: the output is wanted there as a whole
    return Step(function, lambda n: (rest, kwargs), axis)


def _along(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    """Softmax and its kind: fine along any dimension but the batch."""
    dim = kwargs.get("dim", rest[0] if rest else None)
    if not isinstance(dim, int) or dim % len(shape) == axis.dim:
        return None
    return Step(function, lambda n: (rest, kwargs), axis)


def _view(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    if kwargs or not rest:
        return None
    sizes = tuple(rest[0]) if isinstance(rest[0], (tuple, list)) else rest
    if not all(isinstance(size, int) for size in sizes):
        return None
    return _reshaped(function, shape, axis, _resolved(sizes, shape))


def _flatten(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    start = kwargs.get("start_dim", rest[0] if rest else 0) % len(shape)
    end = kwargs.get("end_dim", rest[1] if len(rest) > 1 else -1) % len(shape)
    sizes = (*shape[:start], _product(shape[start : end + 1]), *shape[end + 1 :])
    return _reshaped(torch.Tensor.reshape, shape, axis, sizes)


def _squeeze(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    dims = kwargs.get("dim", rest[0] if rest else None)
    if dims is None:
        chosen = {d for d, size in enumerate(shape) if size == 1}
    else:
        chosen = {d % len(shape) for d in (dims if isinstance(dims, (tuple, list)) else (dims,)) if shape[d] == 1}
    # Named dimensions, so that a micro-batch of one sample does not lose its batch dimension.
    if axis.dim in chosen:
        return None
    left = [d for d in range(len(shape)) if d not in chosen]
    moved = Axis(left.index(axis.dim), axis.outer, axis.inner)
    return Step(torch.squeeze, lambda n: ((tuple(sorted(chosen)),), {}), moved)


def _unsqueeze(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    dim = kwargs.get("dim", rest[0] if rest else None) % (len(shape) + 1)
    return Step(function, lambda n: (rest, kwargs), Axis(axis.dim + (dim <= axis.dim), axis.outer, axis.inner))


def _transpose(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    if len(rest) != 2 or kwargs:
        return None
    first, second = (d % len(shape) for d in rest)
    dim = {first: second, second: first}.get(axis.dim, axis.dim)
    return Step(function, lambda n: (rest, {}), Axis(dim, axis.outer, axis.inner))


def _permute(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    if kwargs or len(dims) != len(shape):
        return None
    order = [d % len(shape) for d in dims]
    return Step(function, lambda n: (rest, {}), Axis(order.index(axis.dim), axis.outer, axis.inner))


def _getitem(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Step | None:
    index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
    if not all(i is Ellipsis or i is None or isinstance(i, (int, slice)) for i in index) or index.count(Ellipsis) > 1:
        return None
    full = _without_ellipsis(index, len(shape))
    dim, out_dim = 0, 0
    moved: Axis | None = None
    for i in full:
        if i is None:
            out_dim += 1
            continue
        if dim == axis.dim:
            if i != slice(None):
                return None
            moved = Axis(out_dim, axis.outer, axis.inner)
        out_dim += 0 if isinstance(i, int) else 1
        dim += 1
    return None if moved is None else Step(function, lambda n: (rest, {}), moved)


def _without_ellipsis(index: tuple[Any, ...], dims: int) -> list[Any]:
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    filler = [slice(None)] * (dims - used)
    if Ellipsis not in index:
        return [*index, *filler]
    at = index.index(Ellipsis)
    return [*index[:at], *filler, *index[at + 1 :]]


def _reshaped(function: Any, shape: Any, axis: Axis, sizes: tuple[int, ...]) -> Step | None:
    """A change of shape in row-major order: find the new dimension that the samples' factor lies in."""
    samples = axis.samples(shape[axis.dim])
    below = axis.inner * _product(shape[axis.dim + 1 :])  # how many entries one step from sample to sample skips
    suffix = 1
    for dim in range(len(sizes) - 1, -1, -1):
        if below % suffix == 0 and (suffix * sizes[dim]) % (below * samples) == 0 and suffix * sizes[dim] > below:
            inner = below // suffix
            moved = Axis(dim, sizes[dim] // (inner * samples), inner)
            return Step(function, partial(_view_arguments, sizes, moved), moved)
        suffix *= sizes[dim]
    return None


def _view_arguments(sizes: tuple[int, ...], axis: Axis, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (_with_size(sizes, axis, samples),), {}


def _with_size(sizes: tuple[int, ...], axis: Axis, samples: int) -> tuple[int, ...]:
    return (*sizes[: axis.dim], axis.size(samples), *sizes[axis.dim + 1 :])


def _resolved(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    known = _product(tuple(size for size in sizes if size != -1))
    return tuple(_product(shape) // max(known, 1) if size == -1 else size for size in sizes)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _holds_tensor(values: tuple[Any, ...]) -> bool:
    return any(
        isinstance(v, torch.Tensor) or (isinstance(v, (tuple, list)) and any(isinstance(i, torch.Tensor) for i in v))
        for v in values
    )


_T = torch.Tensor
_RULES: dict[Any, Callable[..., Step | None]] = {
    **dict.fromkeys((_T.view, _T.reshape), _view),
    torch.reshape: _view,
    **dict.fromkeys((_T.flatten, torch.flatten), _flatten),
    **dict.fromkeys((_T.squeeze, torch.squeeze), _squeeze),
    **dict.fromkeys((_T.unsqueeze, torch.unsqueeze), _unsqueeze),
    **dict.fromkeys((_T.transpose, torch.transpose), _transpose),
    **dict.fromkeys((_T.permute, torch.permute), _permute),
    _T.__getitem__: _getitem,
    **dict.fromkeys((_T.log_softmax, torch.log_softmax, F.log_softmax), _along),
    **dict.fromkeys((_T.softmax, torch.softmax, F.softmax), _along),
    **dict.fromkeys((_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.contiguous), _cast),
    **dict.fromkeys((_T.sigmoid, torch.sigmoid, F.sigmoid, _T.tanh, torch.tanh, F.logsigmoid), _pointwise),
    **dict.fromkeys((_T.mul, _T.div, _T.add, _T.sub, _T.neg, torch.neg, torch.mul, torch.div), _pointwise),
    **dict.fromkeys((_T.__mul__, _T.__rmul__, _T.__truediv__, _T.__neg__), _pointwise),
}
