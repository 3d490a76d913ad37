"""Finds what a loss makes of several samples and what was 0 in a proof, which therefore shows nothing of how it adds up: a
margin that no sample exceeds yet, a mask that leaves none. A pass checks that it still is 0.

Not covered: compiled code, custom autograd functions, results with more than `SMALL` entries or with some that are not 0, and
in-place sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.batches.tree import tensors
from memfit.engine.call_context import is_faking
from memfit.engine.divisors import CLOSE, denominators, read
from memfit.engine.known_means import nodes_of

SMALL = 1 << 14
SUMS = ("sum", "nansum", "mean", "nanmean")
"""Functions that add up entries of one sample each, divided by what the graph says."""
MIXING = ("cumsum", "cumprod", "cummax", "cummin", "flip", "roll")
"""Functions whose results have an entry per sample, made of several samples."""
Shape = tuple[int, ...]


class Idle(NamedTuple):
    """What was 0 in a proof: a result of a function, the `number`-th that it returned; None: all of them of this `shape`, as a
    loop over samples calls it."""

    function: str
    number: int | None
    shape: Shape | None = None

    def __str__(self) -> str:
        return f"{self.function}() is no longer 0, as it was when the loss was proven"


@dataclass(frozen=True)
class Result:
    """A small result with a graph."""

    given: tuple[Shape, ...]
    shape: Shape
    used: bool
    """Whether the loss depends on it. (Results of parameters alone are none.)"""
    idle: bool
    """Whether it is used, and 0."""
    denominator: float | None
    """What the loss divides it by, if it is linear in what it is made of. NaN: unknown."""
    of_zero: bool
    """Whether what it is made of is 0."""


@dataclass(frozen=True)
class Seen:
    """What the loss of `samples` samples is made of: small results by function, in order."""

    samples: int
    results: dict[str, list[Result | None]]

    def entries_per_sample(self, result: Result) -> float:
        """Return how many entries the first argument has for each sample."""
        return math.prod(result.given[0]) / self.samples

    def is_of_pairs(self, result: Result) -> bool:
        """Whether a result has an entry for each pair of samples."""
        return result.shape.count(self.samples) > 1

    @property
    def compares(self) -> bool:
        """Whether the loss depends on something for each pair of samples."""
        found = (each for some in self.results.values() for each in some if each is not None)
        return any(each.used and self.is_of_pairs(each) for each in found)


class Results(TorchFunctionMode):
    """Function mode that records small results with a graph, or whether those `wanted` are 0."""

    def __init__(self, wanted: Sequence[Idle] | None = None) -> None:
        super().__init__()
        self.nonzero: dict[Idle, torch.Tensor] = {}
        self._wanted = None if wanted is None else frozenset(wanted)
        self._calls: Counter[str] = Counter()
        self._found: dict[str, list[_FoundResult | None]] = {}
        self._constant = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (torch.Tensor, tuple, list)) and not in_transform():
            for made in tensors(result):
                if type(made) is torch.Tensor and made.grad_fn is not None:
                    self._look(func.__name__, made, args, kwargs)
        return result

    def _look(self, function: str, made: torch.Tensor, args: Any, kwargs: Any) -> None:
        number = self._calls[function]
        self._calls[function] += 1
        if self._wanted is None:
            self._found.setdefault(function, []).append(self._recorded(tensors((args, kwargs or {})), made))
            return
        for name in (Idle(function, number), Idle(function, None, tuple(made.shape))):
            if name in self._wanted:
                nonzero = made.detach().any()
                self.nonzero[name] = nonzero | self.nonzero[name] if name in self.nonzero else nonzero

    def _recorded(self, given: Sequence[torch.Tensor], made: torch.Tensor) -> _FoundResult | None:
        if all(isinstance(t, nn.Parameter) or t in self._constant or not (t.requires_grad or t.dim()) for t in given):
            self._constant[made] = True  # the same in every part
            return None
        self._constant.pop(made, None)  # written in place
        if not 0 < made.numel() <= SMALL:
            return None
        of = [t.detach().any() for t in given if t.requires_grad and t.numel() <= SMALL]
        return _FoundResult(tuple(tuple(t.shape) for t in given), tuple(made.shape), made.detach().any(), of, made.grad_fn)

    def of(self, loss: torch.Tensor, samples: int) -> Seen:
        """Return what was recorded, after the loss of `samples` samples was computed."""
        zero = [each for some in self._found.values() for each in some if each is not None and not bool(each.nonzero)]
        below, divided = (set(nodes_of([loss])), denominators(loss)) if zero else (set[Any](), dict[Any, float]())

        def result(each: _FoundResult | None) -> Result | None:
            if each is None:
                return None
            used = each.node in below
            idle = used and not bool(each.nonzero)
            of_zero = idle and not any(map(bool, each.of))
            return Result(each.given, each.shape, used, idle, divided.get(each.node), of_zero)

        return Seen(samples, {function: [*map(result, some)] for function, some in self._found.items()})


@dataclass(frozen=True, eq=False)
class _FoundResult:
    given: tuple[Shape, ...]
    shape: Shape
    nonzero: torch.Tensor
    of: list[torch.Tensor]
    node: Any


class IdleSums:
    """Checks in each micro-batch of a pass what was 0 in the proof of its weighting."""

    def __init__(self, names: Sequence[Idle]) -> None:
        self._names, self._looks = names, list[Results]()

    def watching(self) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and loss."""
        if not self._names or is_faking():
            return nullcontext()
        self._looks.append(Results(self._names))
        return self._looks[-1]

    def changed(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return what differs from the proof, or None. Synchronizes once if results are on the device."""
        names = [name for name in self._names if name.number is not None]
        flags = [(name, look.nonzero.get(name)) for look in self._looks for name in names]
        flags += [(name, look.nonzero[name]) for look in self._looks for name in self._names if name in look.nonzero]
        return first_set(flags, device, dtype)


def first_set(flags: Sequence[tuple[Any, torch.Tensor | None]], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the text of the first one whose flag is set or missing, or None. Synchronizes once if flags are on the device."""
    known = [flag for _, flag in flags if type(flag) is torch.Tensor]
    numbers = iter(read(known, device, dtype))
    return next((str(name) for name, flag in flags if type(flag) is not torch.Tensor or next(numbers)), None)


def idle_in(whole: Seen, parts: Sequence[Seen], kind: str) -> tuple[Idle, ...]:
    """Return what several samples make that is 0 in a whole and in its parts, unless any values of it fit this kind of
    weighting."""
    looks, found = (whole, *parts), list[Idle]()
    for function, results in whole.results.items():
        rows = [look.results.get(function, []) for look in looks]
        if all(len(row) == len(results) for row in rows):
            found += [Idle(function, i) for i, same in enumerate(zip(*rows)) if _is_idle(function, looks, same, kind)]
        else:
            found += [Idle(function, None, shape) for shape in _idle_shapes(function, looks, rows, kind)]
    return tuple(found)


def _idle_shapes(
    function: str, looks: Sequence[Seen], rows: Sequence[Sequence[Result | None]], kind: str
) -> Iterator[Shape]:
    """Yield the shapes whose results are all 0, of a function that is called more often for more samples."""
    for shape in dict.fromkeys(each.shape for each in rows[0] if each is not None):
        groups = [[each for each in row if each is not None and each.shape == shape] for row in rows]
        firsts = [group[0] if group else None for group in groups]
        if all(each.idle for group in groups for each in group) and _is_idle(function, looks, firsts, kind):
            yield shape


def _is_idle(function: str, looks: Sequence[Seen], found: Sequence[Result | None], kind: str) -> bool:
    """Whether a result is 0 in all looks, has entries that belong to no sample alone, and may add up otherwise."""
    there = [each for each in found if each is not None and each.idle]
    if len(there) < len(found):
        return False
    whole, *parts = there
    one_shape = all(part.shape == whole.shape for part in parts)
    of_pairs = all(look.is_of_pairs(each) for look, each in zip(looks, there))
    return (one_shape or of_pairs or function in MIXING) and not _fits(function, looks, there, kind)


def _fits(function: str, looks: Sequence[Seen], found: Sequence[Result], kind: str) -> bool:
    """Whether a result adds up as a weighting of this kind says, whatever its values."""
    whole, *parts = found
    divided = [each.denominator for each in found if each.denominator is not None]
    if len(divided) < len(found):
        return False
    if all(part.given == whole.given for part in parts):
        return all(each.of_zero for each in found)  # then what it is made of counts
    per_sample = {look.entries_per_sample(each) for look, each in zip(looks, found)}
    if function not in SUMS or len(per_sample) > 1 or per_sample == {0.0} or all(look.compares for look in looks):
        return False
    weights = {"samples": [float(look.samples) for look in looks], "sum": [1.0] * len(looks)}.get(kind)
    return weights is not None and _are_proportional(divided, weights)


def _are_proportional(numbers: Sequence[float], weights: Sequence[float]) -> bool:
    each = [number / weight for number, weight in zip(numbers, weights)]
    return max(each) - min(each) <= CLOSE * max(map(abs, each)) < math.inf


def in_transform() -> bool:
    """Return whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
