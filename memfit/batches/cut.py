"""Finds the batch dimension of every tensor in a batch, and cuts the batch into micro-batches.

Not covered: samples of different sizes concatenated without a batch dimension (graphs, packed sequences inside other
arguments). They raise Refused, and the message names the workaround, `split=`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product, repeat
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from memfit._errors import Refused, UsageError
from memfit.batches.pieces import bounds
from memfit.batches.tree import Path, builder, children, first_same, flat, is_column, leaves, path_name, rebuild


@dataclass(frozen=True)
class Axis:
    """The batch dimension of a tensor. Its size is `outer * samples * inner`.

    A plain batch dimension has outer = inner = 1; a flattened [batch, time] has inner = time, a flattened
    [time, batch] has outer = time.
    """

    dim: int
    """Index of the dimension, counted from the front."""
    outer: int = 1
    """Entries per sample that vary slower than the sample index (time, if time comes first)."""
    inner: int = 1
    """Entries per sample that vary faster than the sample index (time, if the batch comes first)."""

    def samples(self, size: int) -> int:
        """Return the number of samples in a dimension of `size` entries."""
        return size // (self.outer * self.inner)

    def size(self, samples: int) -> int:
        """Return the size of the dimension for that many samples."""
        return self.outer * samples * self.inner

    def narrow(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the samples `start:stop` of `tensor`: a view if the memory layout allows one, else a copy."""
        if self.outer == 1:
            return tensor.narrow(self.dim, start * self.inner, (stop - start) * self.inner)
        whole = tensor.shape[self.dim] // (self.outer * self.inner)
        parts = tensor.unflatten(self.dim, (self.outer, whole, self.inner))
        return parts.narrow(self.dim + 1, start, stop - start).flatten(self.dim, self.dim + 2)

    def like_first(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        """Return the first `samples` samples, or a tensor with that many if there are fewer. Floating-point tensors then are
        one expanded, uninitialized element. Other dtypes repeat the samples, so that the values stay valid."""
        there = self.samples(tensor.shape[self.dim])
        if samples <= there:
            return self.narrow(tensor, 0, samples)
        if tensor.is_floating_point():
            shape = (*tensor.shape[: self.dim], self.size(samples), *tensor.shape[self.dim + 1 :])
            return tensor.detach().new_empty(()).expand(shape).requires_grad_(tensor.requires_grad)
        return self.narrow(self.join([tensor] * -(-samples // there)), 0, samples)

    def reversed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` with its samples in reverse order."""
        whole = self.samples(tensor.shape[self.dim])
        parts = tensor.unflatten(self.dim, (self.outer, whole, self.inner))
        return parts.flip(self.dim + 1).flatten(self.dim, self.dim + 2)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate pieces of `narrow` along the batch dimension."""
        if self.outer == 1:
            return torch.cat(list(parts), self.dim)
        open_parts = [part.unflatten(self.dim, (self.outer, -1, self.inner)) for part in parts]
        return torch.cat(open_parts, self.dim + 1).flatten(self.dim, self.dim + 2)


@dataclass(frozen=True)
class Layout:
    """The batch dimension of every leaf of a batch, or None for a leaf that every micro-batch receives whole."""

    axes: tuple[Axis | None, ...]
    """One entry per leaf, in the order of `tree.leaves`."""
    samples: int
    """Number of samples in the batch this layout was found on."""

    @property
    def cuts(self) -> bool:
        """Whether any leaf is cut."""
        return any(axis is not None for axis in self.axes)


def cut(tree: Any, layout: Layout, start: int, stop: int) -> Any:
    """Return the samples `start:stop` of a batch: same nesting, tensors narrowed (views), the rest unchanged.

    Raises Refused if the batch has another number of leaves than the one the layout was found on.
    """
    return cutter(tree, layout)(start, stop)


def cutter(tree: Any, layout: Layout) -> Callable[[int, int], Any]:
    """Return `cut` as a function of (start, stop) for many pieces of one batch, whose leaves are found once."""
    found, build = flat(tree), builder(tree)
    if len(found) != len(layout.axes):
        raise uncuttable(f"it has {len(found)} parts, and earlier ones like it had {len(layout.axes)}")
    narrowed = [_narrowing(leaf, axis) for leaf, axis in zip(found, layout.axes)]
    firsts = first_same(found)
    if len(set(firsts)) == len(found):
        return lambda start, stop: build(iter([part(start, stop) for part in narrowed]))

    def cut_once(start: int, stop: int) -> Any:
        made = {i: narrowed[i](start, stop) for i in set(firsts)}
        return build(iter([made[i] for i in firsts]))

    return cut_once


def pieces_of(tree: Any, layout: Layout, pieces: Sequence[int]) -> list[Any]:
    """Cut a batch into consecutive pieces of these sizes, from the first sample on."""
    build = builder(tree)
    found = flat(tree)
    parts, firsts = [_parts(leaf, axis, pieces) for leaf, axis in zip(found, layout.axes)], first_same(found)
    return [build(iter([piece[i] for i in firsts])) for _, *piece in zip(pieces, *parts)]


def like_first(tree: Any, layout: Layout, samples: int) -> Any:
    """Return the first `samples` samples of a batch, or as many of the same shapes if it has fewer. Only shapes matter."""
    def first(leaf: Any, axis: Axis | None) -> Any:
        if isinstance(leaf, torch.Tensor) and axis is not None:
            return axis.like_first(leaf, samples)
        return leaf if axis is None else (leaf * -(-samples // len(leaf)))[:samples]

    found = flat(tree)
    made = [first(leaf, axis) for leaf, axis in zip(found, layout.axes)]
    return rebuild(tree, iter([made[i] for i in first_same(found)]))


def cut_samples(tree: Any, layout: Layout, indices: Sequence[int]) -> Any:
    """Return single samples of a batch, in the order of `indices` (copies)."""
    piece = cutter(tree, layout)
    pieces = [flat(piece(i, i + 1)) for i in indices]
    made = [_joined([piece[k] for piece in pieces], axis) for k, axis in enumerate(layout.axes)]
    return rebuild(tree, iter([made[i] for i in first_same(flat(tree))]))


def layout_from_two(small: Any, few: int, large: Any, many: int) -> Layout:
    """Infer the layout from a batch of `few` and one of `many` equal samples. The dimension that grew is the batch.

    Raises Refused if a leaf changed and none of its dimensions can be the batch dimension.
    """
    refuse_packed(large)
    first, second = list(leaves(small)), list(leaves(large))
    if [path for path, _ in first] != [path for path, _ in second]:
        raise uncuttable("its structure depends on the number of samples")
    axes = tuple(_grown(path, a, few, b, many) for (path, a), (_, b) in zip(first, second))
    return Layout(axes, samples=many)


def candidate_layouts(tree: Any, samples: int, limit: int = 16) -> Iterator[Layout]:
    """Yield layouts by which `tree` could be a batch of `samples`, most likely first. Each must be proven on the model.

    Raises Refused for packed sequences.
    """
    refuse_packed(tree)
    found = flat(tree)
    choices, same = [_dims_of_size(leaf, samples) for leaf in found], list(enumerate(first_same(found)))
    if not any(dims != [None] for dims in choices):
        return
    seen = set()
    first = tuple(dims[0] for dims in choices)
    if _disagreement(first) == 1:  # nothing precedes it, and the others are rarely needed
        seen.add(first)
        yield Layout(first, samples)
    ordered = islice(product(*choices), 4096)
    # Layouts in which all tensors agree on the dimension come first: [batch, ...] everywhere, then [time, batch, ...]. Layouts
    # in which a tensor with such a dimension is shared by all samples come last.
    for axes in sorted(ordered, key=lambda axes: (axes.count(None), _disagreement(axes), [_rank(axis) for axis in axes])):
        if any(axes[i] != axes[first] for i, first in same):
            continue
        if axes not in seen and len(seen) < limit and any(axis is not None for axis in axes):
            seen.add(axes)
            yield Layout(axes, samples)


def shares_samples(tree: Any, layout: Layout) -> bool:
    """Return whether every micro-batch gets all of a tensor that could be cut."""
    found = zip(flat(tree), layout.axes)
    return any(axis is None and _dims_of_size(leaf, layout.samples) != [None] for leaf, axis in found)


def shared_samples(tree: Any) -> int | None:
    """Return the size of the first dimension if all tensors with more than one element share it, else None."""
    found = [leaf for leaf in flat(tree) if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.numel() > 1]
    sizes = {None if leaf.is_nested else leaf.shape[0] for leaf in found}
    return sizes.pop() if len(sizes) == 1 else None


def usual_samples(tree: Any) -> int | None:
    """Return the size of the first dimension that most tensors share, at least two of them, else None. The other tensors
    (class weights, a mask of positions) are the same for all samples."""
    found = Counter(t.shape[0] for t in flat(tree) if isinstance(t, torch.Tensor) and t.dim() and t.numel() > 1)
    ((size, count), *others) = found.most_common() or [(0, 0)]
    return size if count > 1 and all(count > other for _, other in others) else None


def common_size(tree: Any) -> int | None:
    """Return the only size above 1 that all tensors have among their dimensions, else None. Needs at least two tensors."""
    found = [set(leaf.shape) - {1} for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]
    shared = set.intersection(*found) if len(found) > 1 else set()
    return shared.pop() if len(shared) == 1 else None


def first_size(tree: Any) -> int | None:
    """Return the size of the first dimension of the first tensor with more than one element, else None."""
    found = (t.shape[0] for t in flat(tree) if isinstance(t, torch.Tensor) and t.dim() and t.numel() > 1 and not t.is_nested)
    return next(found, None)


def second_size(tree: Any) -> int | None:
    """Return the size of the second dimension if all tensors with two or more dimensions share it, else None."""
    found = {leaf.shape[1] for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1}
    return found.pop() if len(found) == 1 else None


def unread(tree: Any) -> list[str]:
    """Return the type names of leaves that are not tensors, text, numbers or the like. memfit finds no samples in them."""
    simple = (torch.Tensor, str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
    found = [leaf for _, leaf in leaves(tree) if not isinstance(leaf, simple) and not is_column(leaf) and not callable(leaf)]
    return list(dict.fromkeys(type(leaf).__name__ for leaf in found))


def look_of(batch: Any) -> Hashable:
    """Return a key that is equal for batches cut the same way: tensors in one tuple, list or dict. None for other batches."""
    if type(batch) not in (tuple, list, dict):
        return None
    parts = list(batch.values()) if type(batch) is dict else batch
    if not all(type(part) is torch.Tensor for part in parts):
        return None
    names = tuple(batch) if type(batch) is dict else None
    return type(batch), names, tuple([part.shape for part in parts]), tuple(first_same(parts))


def refuse_no_batch(value: Any) -> None:
    """Raise if `value` holds no tensor: UsageError if it cannot be a batch, else Refused."""
    if any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(value)):
        return
    if value is None or isinstance(value, (bool, int, float, str)):
        raise UsageError(
            "cutting an effective batch",
            found=f"the batch is {value!r}",
            next_move="pass what run.loader yields, or a batch whose tensors have the samples along their first dimension",
        )
    raise uncuttable(f"it has no tensor (it is of type {type(value).__name__})")


def uncuttable(reason: str) -> Refused:
    """Return the error for a batch that cannot be cut. It names the workaround."""
    return Refused(
        "cutting the batch into micro-batches",
        found=reason,
        next_move="pass split=, a function (batch, sizes) -> list of batches with that many samples each",
    )


def refuse_packed(tree: Any) -> None:
    """Raise Refused if the batch holds a packed sequence."""
    if isinstance(tree, PackedSequence):
        raise uncuttable("it holds a PackedSequence, in which the time steps of all samples are interleaved")
    for _, part in children(tree) or ():
        refuse_packed(part)


def _narrowing(leaf: Any, axis: Axis | None) -> Callable[[int, int], Any]:
    if axis is None:
        return lambda start, stop: leaf
    if isinstance(leaf, torch.Tensor):
        return partial(axis.narrow, leaf)
    return lambda start, stop: leaf[start:stop]


def _parts(leaf: Any, axis: Axis | None, pieces: Sequence[int]) -> Iterable[Any]:
    if axis is None:
        return repeat(leaf)
    if type(leaf) is torch.Tensor and axis.outer == 1 and not leaf.requires_grad:
        # Autograd forbids in-place writes to the views of `split`. The pieces of `unsafe_split` allow them, as `narrow` does.
        return torch.unsafe_split_with_sizes(leaf, [n * axis.inner for n in pieces], axis.dim)
    part = _narrowing(leaf, axis)
    return [part(start, stop) for start, stop in bounds(pieces)]


def _joined(parts: list[Any], axis: Axis | None) -> Any:
    if axis is None:
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return axis.join(parts)
    return type(parts[0])(item for part in parts for item in part)


def _grown(path: Path, small: Any, few: int, large: Any, many: int) -> Axis | None:
    if is_column(small) and is_column(large):
        return Axis(0) if len(small) == few and len(large) == many else None
    if not (isinstance(small, torch.Tensor) and isinstance(large, torch.Tensor)):
        _check_constant(path, small, few, large, many)
        return None
    if small.shape == large.shape:
        return None
    if small.dim() == large.dim():
        changed = [dim for dim in range(small.dim()) if small.shape[dim] != large.shape[dim]]
        if len(changed) == 1:
            dim = changed[0]
            per_sample, rest = divmod(small.shape[dim], few)
            if rest == 0 and large.shape[dim] == per_sample * many:
                return Axis(dim, inner=per_sample)
    shapes = f"{tuple(small.shape)} for {few} samples and {tuple(large.shape)} for {many}"
    raise uncuttable(f"{path_name(path)} has the shape {shapes}: no dimension is the batch")


def _check_constant(path: Path, small: Any, few: int, large: Any, many: int) -> None:
    try:
        constant = small is large or bool(small == large)
    except (TypeError, ValueError, RuntimeError):  # arrays compare elementwise
        constant = False
    if constant:
        return
    known = isinstance(small, (bool, int, float, str)) and isinstance(large, (bool, int, float, str))
    what = f"{small!r} for {few} samples and {large!r} for {many}" if known else f"of type {type(large).__name__}"
    raise uncuttable(f"{path_name(path)} is {what}: neither the same for all samples nor a tensor")


def _dims_of_size(leaf: Any, samples: int) -> list[Axis | None]:
    if is_column(leaf):
        if len(leaf) != samples:
            return [None]
        return [Axis(0)] if isinstance(leaf[0], (str, bytes)) else [Axis(0), None]
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return [None]
    # None comes last: a leaf with a dimension of that size may still be shared by all samples (a [time, time] mask).
    return [*(Axis(dim) for dim, size in enumerate(leaf.shape) if size == samples), None]


def _disagreement(axes: tuple[Axis | None, ...]) -> int:
    return len({axis.dim for axis in axes if axis is not None})


def _rank(axis: Axis | None) -> int:
    return 99 if axis is None else axis.dim
