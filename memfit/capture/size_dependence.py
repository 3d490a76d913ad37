"""Detects code that acts differently on many samples than on few: takes the first 64, runs four at a time, asks how many.

On a few samples such code may treat the whole and its parts alike. The signs are the functions and modules it calls and the
non-tensor arguments of functions. Not covered: what a size decides without any of these.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.batches.tree import tensors

SPLITTING = frozenset("split unsafe_split".split())
"""Functions that split into pieces of a given size."""
CHUNKING = frozenset("chunk unsafe_chunk tensor_split".split())
"""Functions that split into a given number of pieces."""
COMPARING = frozenset("lt le gt ge eq ne less less_equal greater greater_equal not_equal".split())
"""Comparisons. A number compared with consecutive numbers is a position."""
SHAPING = frozenset("view reshape unsqueeze to long int float double".split())
"""Functions that keep consecutive numbers consecutive."""
GATHERING = frozenset("cumsum argsort bincount sum count_nonzero".split())
"""Functions whose entries tell of several samples: how many came before, their rank, how many there are."""
KEEPING = frozenset("mul sub add div truediv rsub radd rmul getitem gather expand".split()) | SHAPING
"""Functions whose results tell of as many samples as their arguments."""
LIMITING = frozenset("clamp clip clamp_min clamp_max".split())
"""Functions with limits. A limit, or a comparison, of what tells of several samples decides by their number."""
DIVIDING = frozenset("floor_divide floordiv remainder mod fmod".split())
"""Functions that group consecutive numbers."""
MAKING = frozenset("tensor as_tensor scalar_tensor full".split())
"""Functions that make a tensor of a number, which may be the number of samples."""
PLACING = frozenset("getitem setitem select narrow index_select take gather unbind pad roll one_hot".split())
"""Functions whose integers may be positions of samples."""
SIZING = frozenset("view reshape expand repeat zeros ones full empty arange new_zeros new_ones new_full new_empty".split())
"""Functions whose integers may be sizes that follow the number of samples."""
STEP = "step"
"""Stands for a slice's step, in place of a function's name."""
GROUPING = DIVIDING | {STEP}
"""What takes numbers that may be the entries of one sample, which says nothing of positions."""
Function = tuple[str, Any]
"""The type of the module whose forward calls a function (empty: called outside of modules), and the function."""
Taken = tuple[str, int, int, int]
"""A bound, step, size or number of pieces: (function, dimension, its size, number)."""


SIZE = "the number of samples"
"""The name of what decides, in error messages."""


class Positions(TorchFunctionMode):
    """Records indexing by position in `taken`, called functions with their non-tensor arguments in `functions`, and the `calls`
    of modules. A function is known by the module whose forward calls it, and itself: by the module's name, if it is among
    `names`, else by its type. Tensors among `names` count as arguments."""

    def __init__(self, names: Mapping[int, str] = MappingProxyType({})) -> None:
        super().__init__()
        self._names = names
        self.taken: set[Taken] = set()
        self.functions: list[tuple[Function, tuple[Any, ...]]] = []
        self.calls: Counter[int] = Counter()
        self._running: list[nn.Module] = []
        self._thread = threading.get_ident()
        self._counting = WeakTensorKeyDictionary()
        """Tensors of consecutive numbers."""
        self._gathered = WeakTensorKeyDictionary()
        """Tensors that tell of several samples, with the dimension that they were along and its size."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.__name__.strip("_")
        result = func(*args, **(kwargs or {}))
        self.taken.update(taken(name, args, kwargs or {}))
        self.functions.append(((self._inside(), func), tuple(_plain((args, kwargs), self._names))))
        given = tensors((args, kwargs or {}))
        counting = bool(given) and all(tensor in self._counting for tensor in given)
        if name == "arange" or (counting and name in SHAPING):
            for made in tensors(result):
                self._counting[made] = True
        elif counting:
            long = [(axis, size) for axis, size in enumerate(given[0].shape) if size > 1]
            if name in COMPARING | LIMITING | DIVIDING and len(long) == 1:  # (else the counting dimension is unknown)
                numbers = [value for value in (*args[1:], *(kwargs or {}).values()) if type(value) is int]
                self.taken.update((name, *long[0], number) for number in numbers)
        self._follow(name, args, kwargs or {}, given, result)
        return result

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor], result: Any
    ) -> None:
        """Record limits and comparisons of what functions have gathered from several samples."""
        known = next((self._gathered[tensor] for tensor in given if tensor in self._gathered), None)
        if name in GATHERING and isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            self._gathered[result] = _along(name, args, kwargs)
        elif name in MAKING and isinstance(result, torch.Tensor) and (number := _number_in(args)) is not None:
            self._gathered[result] = 0, number
        elif known is not None and name in KEEPING and isinstance(result, torch.Tensor):
            self._gathered[result] = known
        elif known is not None and name in LIMITING | COMPARING:
            limits = [value for value in (*args[1:], *kwargs.values()) if type(value) in (int, float)]
            self.taken.update((name, *known, limit) for limit in limits if limit > 1)  # (at most 1: whether there are any)

    def _inside(self) -> str:
        if not self._running:
            return ""
        module = self._running[-1]
        return self._names.get(id(module)) or type(module).__qualname__  # (a class may be made in each forward)

    @contextmanager
    def watching(self) -> Iterator[Positions]:
        """Records everything that runs inside."""
        before = nn.modules.module.register_module_forward_pre_hook(self._enters)
        after = nn.modules.module.register_module_forward_hook(self._leaves, always_call=True)
        try:
            with self:
                yield self
        finally:
            before.remove()
            after.remove()

    def _enters(self, module: nn.Module, args: Any) -> None:
        self.calls[id(module)] += 1
        if threading.get_ident() == self._thread:  # hooks are there for all threads, and a mode for its own
            self._running.append(module)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running and self._running[-1] is module and threading.get_ident() == self._thread:
            self._running.pop()


def decides_by_position(looks: Sequence[tuple[int, Positions]]) -> bool:
    """Whether positions decide, by looks at a number of samples each: first the whole, then its parts."""
    (samples, whole), *parts = looks
    if told_by_positions(samples, whole.taken, [(count, part.taken) for count, part in parts]):
        return True
    return any(not _is_affine({count: look.calls[module] for count, look in looks}) for module in whole.calls)


Look = tuple[int, Positions]
"""(number of samples, what was recorded)."""


def decides_by_size(few: Look, many: Look, all_: Look) -> bool:
    """Whether looks at a few samples, a few more, and all of them show that their number decides. Of functions that are called
    equally often for any number of samples, calls are compared one by one."""
    looks = dict((few, many, all_))
    (less, one), (more, other), (n, _) = few, many, all_
    if told_by_positions(more, other.taken, [(less, one.taken)], most=n):
        return True
    times = _times(looks)
    if not all(_is_affine(counts, absent=True) for counts in times.values()):
        return True
    found = [[(f, given) for f, given in look.functions if len({*times[f].values()}) == 1] for look in looks.values()]
    for given in zip(*found):
        if len({func for func, _ in given}) > 1:
            return True
        lengths = {n: len(values) for n, (_, values) in zip(looks, given)}
        if len({*lengths.values()}) > 1:  # a list with an entry per sample
            its, more, whole = (frozenset(values) for _, values in given)
            if not _is_affine(lengths, absent=True) or (its == more and whole - its):
                return True
        elif any(_is_chosen(dict(zip(looks, values))) for values in zip(*(values for _, values in given))):
            return True
    return False


def differently_used(few: Look, many: Look, all_: Look) -> set[Any]:
    """Return arguments that are used for a few samples and a few more, but for all not as often as these predict, of functions
    that are called once per sample, and maybe elsewhere, so that single calls cannot be matched.

    Integers may be positions, of which many samples have more: arguments with these are returned only if they are missing.
    """
    looks = dict((few, many, all_))
    repeated = {func for func, counts in _times(looks).items() if len({*counts.values()}) > 1}
    used = {n: Counter(each for each in look.functions if each[0] in repeated) for n, look in looks.items()}
    found = set()
    for each in set().union(*used.values()):
        (_, func), values = each
        counts = {n: count[each] for n, count in used.items()}
        its, more, whole = counts.values()
        if func.__name__.strip("_") in PLACING | SIZING and any(type(value) is int for value in values):
            differs = not whole or its == more > whole
        else:
            differs = not _is_affine(counts, absent=True)
        if its and more and differs:
            found.add(each)
    return found


def _times(looks: Mapping[int, Positions]) -> dict[Function, dict[int, int]]:
    """By function, how often it is called for each number of samples."""
    counts = {n: Counter(func for func, _ in look.functions) for n, look in looks.items()}
    return {func: {n: count[func] for n, count in counts.items()} for func in set().union(*counts.values())}


def _is_chosen(values: Mapping[int, Any]) -> bool:
    """Whether an argument is equal for few samples and a few more but differs for all, or is a number that grows with the
    samples up to a limit."""
    its, more, whole = values.values()
    if type(its) is type(more) and its == more:
        return type(whole) is not type(its) or bool(whole != its)
    if all(type(value) is int for value in (its, more, whole)):
        return not _is_affine(dict(values), absent=True)
    return False


def names_in(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's modules, parameters and buffers by their ids, for `Positions`."""
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    return {id(each): name for name, each in named}


def _number_in(args: Sequence[Any]) -> int | None:
    """The whole number above 1 that a tensor is made of, the last argument; None if it is made of something else."""
    value: Any = args[-1] if args else None
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 1 or value % 1:
        return None
    return int(value)


def _plain(value: Any, names: Mapping[int, str]) -> Iterator[Any]:
    """Yield the numbers, strings and data types in any nesting, the names of tensors, and how many tensors a list holds."""
    if isinstance(value, torch.Tensor):
        if (name := names.get(id(value))) is not None:
            yield name
    elif isinstance(value, (int, float, complex, str, type(None), torch.dtype)):
        yield value
    elif isinstance(value, slice):
        yield from _plain((value.start, value.stop, value.step), names)
    elif isinstance(value, (tuple, list)):
        if held := sum(isinstance(item, torch.Tensor) for item in value):
            yield held
        for item in value:
            yield from _plain(item, names)
    elif isinstance(value, dict):
        yield from _plain(tuple(value.values()), names)


def told_by_positions(
    samples: int, whole: set[Taken], parts: Sequence[tuple[int, set[Taken]]], *, most: int | None = None
) -> bool:
    """Whether numbers along the samples are equal for the whole and its parts. `most`: the number of samples that will run;
    numbers beyond it decide nothing."""
    if not any(count < samples for count, _ in parts):
        return False
    for name, axis, size, number in whole:
        each, rest = divmod(size, samples)
        if rest or not each or (name in GROUPING and number and each % number == 0):
            continue
        if most is not None and (name in CHUNKING or (name != STEP and abs(number) >= each * most)):
            continue
        if all((name, axis, each * count, number) in part for count, part in parts):
            return True
    return False


def _is_affine(numbers: Mapping[int, int], *, absent: bool = False) -> bool:
    """Whether counts by number of samples are constant or affine. If some are zero, as for a mixture-of-experts module that is
    not called, values decide, and this returns True unless `absent`."""
    if len(numbers) < 3 or not (absent or all(numbers.values())):
        return True
    (a, its), (b, more), *others = sorted(numbers.items())
    return all((number - its) * (b - a) == (more - its) * (n - a) for n, number in others)


def taken(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Taken]:
    """Yields the numbers in a call that would mean something else for another size of the dimension: out-of-range bounds,
    steps, piece sizes not below the dimension's size, and numbers of pieces."""
    if name in ("getitem", "setitem") and len(args) > 1:
        for axis, index in _sliced(args[0], args[1]):
            size = args[0].shape[axis]
            for bound in (index.start, index.stop):
                if type(bound) is int and bound and abs(bound) >= size:
                    yield name, axis, size, bound
            if type(index.step) is int and index.step > 1:
                yield STEP, axis, size, index.step
    elif name in SPLITTING | CHUNKING:
        tensor, pieces, axis = _splitting(args, kwargs)
        if isinstance(tensor, torch.Tensor) and type(pieces) is int and type(axis) is int:
            if name in CHUNKING or pieces >= tensor.shape[axis]:
                yield name, axis % tensor.dim(), tensor.shape[axis], pieces


def _along(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the dimension that a function gathers along, and its size; of several dimensions, the first and their product."""
    tensor, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1 if name == "argsort" else None)
    dims = [dim] if type(dim) is int else list(dim) if isinstance(dim, (tuple, list)) and dim else range(tensor.dim())
    axes = [axis % max(1, tensor.dim()) for axis in dims if type(axis) is int]
    return min(axes, default=0), math.prod(tensor.shape[axis] for axis in axes if axis < tensor.dim())


def _splitting(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(tensor, size or number of pieces, dimension) of a function that splits; keywords come in any order."""
    tensor, pieces, axis = (*args[:3], *[None] * 3)[:3]
    for name, value in kwargs.items():
        if name in ("input", "tensor", "self"):
            tensor = value
        elif name == "dim":
            axis = value
        else:
            pieces = value
    return tensor, pieces, 0 if axis is None else axis


def _sliced(tensor: torch.Tensor, index: Any) -> Iterator[tuple[int, slice]]:
    """Yield (dimension, slice) for the slices in an index."""
    entries = index if isinstance(index, tuple) else (index,)
    used = [_dimensions(entry) for entry in entries]
    axis = 0
    for entry, dimensions in zip(entries, used):
        if isinstance(entry, slice):
            yield axis, entry
        axis += tensor.dim() - sum(used) if entry is Ellipsis else dimensions


def _dimensions(entry: Any) -> int:
    """Return the number of dimensions that an index entry consumes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1
