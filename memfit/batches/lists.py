"""Cuts batches that hold a list with one entry per sample, such as images of different sizes and their targets (detection).
Nested tensors and packed sequences count as such lists.

A list is cut by its entries, and the tensors next to it by their first dimension. Not covered: lists of tensors of equal size
in which one dimension also has the batch size, because they look like a model's several inputs; lists inside the batch's
own dictionaries; nested or packed outputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from memfit.batches.pieces import bounds
from memfit.batches.tree import leaves, tensors

Tree = tuple[tuple[Any, ...], dict[str, Any]]


def samples_in_lists(tree: Tree, hint: int | None) -> int | None:
    """Return the number of samples in such lists, or None if there are none. `hint`: samples in the loader's batch."""
    args, kwargs = tree
    lists = [value for value in (*args, *kwargs.values()) if _lists_samples(value, hint)]
    lengths = {len(value) for value in lists}
    lengths |= {_ragged(value) for value in (*args, *kwargs.values())} - {None}
    if len(lengths) != 1:
        return None
    samples = lengths.pop() or 0
    return samples if samples > 0 and hint in (None, samples) else None


def cut_lists(tree: Tree, sizes: Sequence[int]) -> list[Tree]:
    """Cut the arguments into parts of these sizes."""
    args, kwargs = tree
    samples = sum(sizes)

    def part(value: Any, start: int, stop: int) -> Any:
        if _ragged(value) == samples:
            cut = _part_of_packed if isinstance(value, PackedSequence) else _part_of_nested
            return cut(value, start, stop)
        listed = _is_list(value) and len(value) == samples
        along = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == samples
        return value[start:stop] if listed or along else value

    return [
        (tuple(part(value, *ends) for value in args), {name: part(value, *ends) for name, value in kwargs.items()})
        for ends in bounds(sizes)
    ]


def look_of_lists(tree: Tree) -> Hashable:
    """Return a key that is equal for calls that are cut alike, whatever their lists hold."""
    args, kwargs = tree
    return tuple((name, _look(value)) for name, value in (*enumerate(args), *kwargs.items()))


def _is_list(value: Any) -> bool:
    """Whether `value` is a list of tensors with the same number of dimensions, or of mappings with tensors."""
    if type(value) not in (list, tuple) or not value:
        return False
    held = all(isinstance(item, torch.Tensor) and item.dim() == value[0].dim() > 0 for item in value)
    return held or all(isinstance(item, Mapping) and tensors(item) for item in value)


def _lists_samples(value: Any, hint: int | None) -> bool:
    """Whether `value` is such a list with one entry per sample: shapes differ, or no dimension has the batch size."""
    if not _is_list(value):
        return False
    if isinstance(value[0], Mapping) or len({tuple(item.shape) for item in value}) > 1:
        return True
    return len(value) == hint and not any(hint in item.shape for item in value)


def _ragged(value: Any) -> int | None:
    """Return the number of samples in a nested tensor or a packed sequence, or None for anything else."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return value.size(0) if isinstance(value, torch.Tensor) and value.is_nested else None


def _part_of_nested(value: Any, start: int, stop: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(value.unbind()[start:stop]), layout=value.layout)


def _part_of_packed(value: Any, start: int, stop: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    lengths = lengths[start:stop]
    rows = padded[start:stop, : int(lengths.max())]
    return pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=value.sorted_indices is None)


def _look(value: Any) -> Hashable:
    if _is_list(value):
        return "list", _look(value[0])
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.device.type, value.requires_grad
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return tuple((path, _look(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__) for path, leaf in leaves(value))
