"""Rules for operations on one lazy tensor: views, casts, reductions over other dimensions than the samples'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from memfit.batches.cut import Axis
from memfit.capture.expression import Node, Sized

CONSTANTS = (int, float, bool, str, torch.dtype, type(None))


@dataclass(frozen=True)
class Operand:
    """A lazy tensor as an argument: the node that computes it, its shape and its samples' axis."""

    node: Node
    shape: tuple[int, ...]
    axis: Axis


Found = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Axis]
"""(function, its arguments, its keyword arguments, the samples' axis in its result)."""
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Found | None]


def _alone(rule: Callable[..., Any]) -> Rule:
    """Return a rule for an operation on one value with constant arguments."""

    def applied(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        first, rest = args[0], args[1:]
        if not isinstance(first, Operand) or holds_tensor((*rest, *kwargs.values())):
            return None
        found = rule(function, first.shape, first.axis, rest, kwargs)
        if found is None:
            return None
        made, arguments, keywords, axis = found
        return made, (first.node, *arguments), keywords, axis

    return applied


def _cast(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    allowed = (torch.dtype, bool, type(None))
    if function is torch.Tensor.to and not all(isinstance(a, allowed) for a in (*rest, *kwargs.values())):
        return None  # a move to another device needs the whole output there
    return function, rest, kwargs, axis


def _detach(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    return torch.Tensor.detach, rest, kwargs, axis


def _along(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    """Softmax and the like: allowed along any dimension but the batch."""
    dim = kwargs.get("dim", rest[0] if rest else None)
    if not isinstance(dim, int) or dim % len(shape) == axis.dim:
        return None
    return function, rest, kwargs, axis


def _normalized(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    """F.normalize(value, p, dim)."""
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 1)
    return None if not isinstance(dim, int) or dim % len(shape) == axis.dim else (function, rest, kwargs, axis)


def _reducing(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    """Sum, mean and the like over dimensions other than the samples'."""
    dims, keeps, _ = reduced_dims((Operand(None, shape, axis), *rest), kwargs)  # type: ignore[arg-type]
    if dims is None or axis.dim in dims:
        return None
    moved = axis.dim if keeps else axis.dim - sum(dim < axis.dim for dim in dims)
    return function, rest, kwargs, Axis(moved, axis.outer, axis.inner)


def max_values(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns `torch.max(value, dim).values`."""
    return torch.max(value, *args, **kwargs)[0]


def max_indices(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns `torch.max(value, dim).indices`."""
    return torch.max(value, *args, **kwargs)[1]


def min_values(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns `torch.min(value, dim).values`."""
    return torch.min(value, *args, **kwargs)[0]


def min_indices(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns `torch.min(value, dim).indices`."""
    return torch.min(value, *args, **kwargs)[1]


def _extreme(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    """Maximum or minimum over one dimension other than the samples'."""
    dim = kwargs.get("dim", kwargs.get("axis", rest[0] if rest else None))
    return _reducing(function, shape, axis, rest, kwargs) if type(dim) is int else None


def _norm(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    """norm(value, p, dim, keepdim) of a vector per sample, or per position in it."""
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else None)
    if dim is None:
        return None
    keeps = rest[2] if len(rest) > 2 else kwargs.get("keepdim", False)
    found = _reducing(function, shape, axis, (dim, keeps), {})
    return None if found is None else (function, rest, kwargs, found[3])


def reduced_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int] | None, bool, bool]:
    """Return (the reduced dimensions, whether they stay with size 1, whether there are other arguments)."""
    shape, rest = args[0].shape, args[1:]
    dim = kwargs.get("dim", kwargs.get("axis", rest[0] if rest else None))
    keeps = bool(kwargs.get("keepdim", rest[1] if len(rest) > 1 else False))
    more = bool(set(kwargs) - {"dim", "axis", "keepdim"} or len(rest) > 2)
    if dim is None or dim == () or dim == []:
        return set(range(len(shape))), keeps, more
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        return None, keeps, more
    return {d % len(shape) for d in dims}, keeps, more


def _view(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    if kwargs or not rest:
        return None
    sizes = tuple(rest[0]) if isinstance(rest[0], (tuple, list)) else rest
    if not all(isinstance(size, int) for size in sizes):
        return None
    return _reshaped(function, shape, axis, _resolved(sizes, shape))


def _flatten(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    start = kwargs.get("start_dim", rest[0] if rest else 0) % len(shape)
    end = kwargs.get("end_dim", rest[1] if len(rest) > 1 else -1) % len(shape)
    sizes = (*shape[:start], numel_of(shape[start : end + 1]), *shape[end + 1 :])
    return _reshaped(torch.Tensor.reshape, shape, axis, sizes)


def _squeeze(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    dims = kwargs.get("dim", rest[0] if rest else None)
    if dims is None:
        chosen = {d for d, size in enumerate(shape) if size == 1}
    else:
        chosen = {d % len(shape) for d in (dims if isinstance(dims, (tuple, list)) else (dims,)) if shape[d] == 1}
    # By explicit dimensions, so that a micro-batch of one sample keeps its batch dimension.
    if axis.dim in chosen:
        return None
    left = [d for d in range(len(shape)) if d not in chosen]
    moved = Axis(left.index(axis.dim), axis.outer, axis.inner)
    return torch.squeeze, (tuple(sorted(chosen)),), {}, moved


def _unsqueeze(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    dim = kwargs.get("dim", rest[0] if rest else None) % (len(shape) + 1)
    return function, rest, kwargs, Axis(axis.dim + (dim <= axis.dim), axis.outer, axis.inner)


def _transpose(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    if len(rest) != 2 or kwargs:
        return None
    first, second = (d % len(shape) for d in rest)
    dim = {first: second, second: first}.get(axis.dim, axis.dim)
    return function, rest, {}, Axis(dim, axis.outer, axis.inner)


def _permute(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
    dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    if kwargs or len(dims) != len(shape):
        return None
    order = [d % len(shape) for d in dims]
    return function, rest, {}, Axis(order.index(axis.dim), axis.outer, axis.inner)


def _getitem(function: Any, shape: Any, axis: Axis, rest: Any, kwargs: Any) -> Found | None:
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
    return None if moved is None else (function, rest, {}, moved)


def _without_ellipsis(index: tuple[Any, ...], dims: int) -> list[Any]:
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    filler = [slice(None)] * (dims - used)
    if Ellipsis not in index:
        return [*index, *filler]
    at = index.index(Ellipsis)
    return [*index[:at], *filler, *index[at + 1 :]]


def _reshaped(function: Any, shape: Any, axis: Axis, sizes: tuple[int, ...]) -> Found | None:
    """Reshape in row-major order: find the new dimension that contains the samples. For a single sample several may qualify,
    and the one with the fewest entries per sample is taken."""
    samples = axis.samples(shape[axis.dim])
    below = axis.inner * numel_of(shape[axis.dim + 1 :])  # entries between neighbouring samples
    suffix, least = 1, below + (samples > 1)
    found: list[Axis] = []
    for dim in range(len(sizes) - 1, -1, -1):
        if below % suffix == 0 and (suffix * sizes[dim]) % (below * samples) == 0 and suffix * sizes[dim] >= least:
            inner = below // suffix
            found.append(Axis(dim, sizes[dim] // (inner * samples), inner))
        suffix *= sizes[dim]
    if not found:
        return None
    moved = min(found, key=lambda each: each.inner) if samples == 1 else found[0]
    return function, (Sized(partial(_with_size, sizes, moved)),), {}, moved


def _with_size(sizes: tuple[int, ...], axis: Axis, samples: int) -> tuple[int, ...]:
    return (*sizes[: axis.dim], axis.size(samples), *sizes[axis.dim + 1 :])


def _resolved(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    known = numel_of(tuple(size for size in sizes if size != -1))
    return tuple(numel_of(shape) // max(known, 1) if size == -1 else size for size in sizes)


def numel_of(sizes: Sequence[int]) -> int:
    """Return the product of these sizes."""
    product = 1
    for size in sizes:
        product *= size
    return product


def holds_tensor(values: tuple[Any, ...]) -> bool:
    """Whether any of these values, in any nesting, is a tensor or an operand."""
    return any(
        isinstance(v, (torch.Tensor, Operand))
        or (isinstance(v, (tuple, list)) and any(isinstance(i, (torch.Tensor, Operand)) for i in v))
        for v in values
    )


def named(*names: str) -> list[Any]:
    """Returns these functions from every place in torch that has them."""
    places = (torch.Tensor, torch, F)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]

_T = torch.Tensor
ONE_OPERAND: dict[Any, Rule] = {
    **dict.fromkeys(named("view", "reshape"), _alone(_view)),
    **dict.fromkeys(named("flatten"), _alone(_flatten)),
    **dict.fromkeys(named("squeeze"), _alone(_squeeze)),
    **dict.fromkeys(named("unsqueeze"), _alone(_unsqueeze)),
    **dict.fromkeys(named("transpose", "swapaxes", "swapdims"), _alone(_transpose)),
    **dict.fromkeys(named("permute"), _alone(_permute)),
    _T.__getitem__: _alone(_getitem),
    **dict.fromkeys(named("log_softmax", "softmax", "cumsum", "glu"), _alone(_along)),
    **dict.fromkeys(named("norm"), _alone(_norm)),
    **dict.fromkeys(named("normalize"), _alone(_normalized)),
    **dict.fromkeys(named("sum", "mean", "logsumexp", "amax", "amin", "prod", "argmax", "argmin"), _alone(_reducing)),
    **dict.fromkeys((max_values, max_indices, min_values, min_indices), _alone(_extreme)),
    **dict.fromkeys((_T.float, _T.double, _T.half, _T.bfloat16, _T.long, _T.int, _T.to, _T.contiguous), _alone(_cast)),
    **dict.fromkeys((_T.detach, _T.data.__get__), _alone(_detach)),  # type: ignore[attr-defined]
}
"""Rules for operations on one lazy tensor, by function."""
