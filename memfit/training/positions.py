"""Whether code treats samples by their position in the batch: takes the first 64, runs four at a time.

On a few samples it may do the same to the whole as to its parts, and not on all. It is told by the numbers that functions are
given along the samples, and by how often modules are called. Not covered: what a size decides in Python without either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

SPLITTING = frozenset("split unsafe_split".split())
"""Functions that cut into pieces of a given size."""
CHUNKING = frozenset("chunk unsafe_chunk tensor_split".split())
"""Functions that cut into a given number of pieces."""
STEP = "step"
"""In the place of a function's name: how far a slice goes from one entry to the next."""
Taken = tuple[str, int, int, int]
"""Bounds, steps, sizes and numbers of pieces: (function, dimension, its size, number)."""


class Positions(TorchFunctionMode):
    """While active, notes in `taken` what is taken by position, and counts `calls` of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: set[Taken] = set()
        self.calls: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.taken.update(taken(func.__name__.strip("_"), args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, it looks at everything."""
        hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: self.calls.update((id(module),)))
        try:
            with self:
                yield
        finally:
            hook.remove()


def decides_by_position(looks: Sequence[tuple[int, Positions]]) -> bool:
    """Whether looks at so many samples each, the first at those of the others together, show that positions decide."""
    (samples, whole), *parts = looks
    if told_by_positions(samples, whole.taken, [(count, part.taken) for count, part in parts]):
        return True
    return any(not _is_affine({count: look.calls[module] for count, look in looks}) for module in whole.calls)


def told_by_positions(samples: int, whole: set[Taken], parts: Sequence[tuple[int, set[Taken]]]) -> bool:
    """Whether numbers along the samples are the same for the whole as for parts of it."""
    if not any(count < samples for count, _ in parts):
        return False
    for name, axis, size, number in whole:
        each, rest = divmod(size, samples)
        if rest or not each or (name == STEP and each % number == 0):
            continue
        if all((name, axis, each * count, number) in part for count, part in parts):
            return True
    return False


def _is_affine(calls: Mapping[int, int]) -> bool:
    """Whether a module is called as often for any number of samples, or so many times for each. One that some do not call at
    all (an expert) is called as values decide."""
    if not all(calls.values()) or len(calls) < 3:
        return True
    (a, its), (b, more), *others = sorted(calls.items())
    return all((number - its) * (b - a) == (more - its) * (n - a) for n, number in others)


def taken(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Taken]:
    """The places of numbers in a call that another size of the dimension would give another meaning: bounds that it does not
    reach, steps, pieces that it is smaller than, and numbers of pieces."""
    if name in ("getitem", "setitem") and len(args) > 1:
        for axis, index in _sliced(args[0], args[1]):
            size = args[0].shape[axis]
            for bound in (index.start, index.stop):
                if type(bound) is int and bound and abs(bound) >= size:
                    yield name, axis, size, bound
            if type(index.step) is int and index.step > 1:
                yield STEP, axis, size, index.step
    elif name in SPLITTING | CHUNKING and args:
        tensor, pieces, axis = (*args, *kwargs.values(), 0)[:3]
        if isinstance(tensor, torch.Tensor) and type(pieces) is int and type(axis) is int:
            if name in CHUNKING or pieces >= tensor.shape[axis]:
                yield name, axis % tensor.dim(), tensor.shape[axis], pieces


def _sliced(tensor: torch.Tensor, index: Any) -> Iterator[tuple[int, slice]]:
    """(dimension, slice) for the slices in an index."""
    entries = index if isinstance(index, tuple) else (index,)
    used = [_dimensions(entry) for entry in entries]
    axis = 0
    for entry, dimensions in zip(entries, used):
        if isinstance(entry, slice):
            yield axis, entry
        axis += tensor.dim() - sum(used) if entry is Ellipsis else dimensions


def _dimensions(entry: Any) -> int:
    """How many dimensions an entry of an index stands for."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1
