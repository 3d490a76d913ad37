"""Finds what a loss makes of several samples and what a proof shows nothing of: results that were 0 (a margin that no sample
exceeds yet, a mask that leaves none), and limits of what was added up (`relu(mean - c)`), which few samples are on one side of.
A pass checks that the results still are 0, and that all micro-batches are on the same side of a limit. A mean of what is on one
side of a limit is on that side, too.

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

SMALL = 1 << 14
SUMS = ("sum", "nansum", "mean", "nanmean")
"""Functions that add up entries of one sample each, divided by what the graph says."""
MIXING = ("cumsum", "cumprod", "cummax", "cummin", "flip", "roll")
"""Functions whose results have an entry per sample, made of several samples."""
LIMITS = frozenset(
    "relu relu6 clamp clamp_min clamp_max clip minimum maximum max min where hardtanh threshold abs absolute fabs fmax fmin "
    "leaky_relu prelu hardshrink".split()
)
"""Functions of single entries, of which they return some unchanged."""
DISTANCES = ("l1_loss", "smooth_l1_loss", "huber_loss", "margin_ranking_loss")
"""Functions of the absolute value of a difference."""
Shape = tuple[int, ...]


class LimitedCall(NamedTuple):
    """The `number`-th call of a function with a limit, for something made of several samples."""

    function: str
    number: int
    sides: tuple[bool, ...] | None
    """The sides that all micro-batches must be on. None: on the same as the others."""

    def __str__(self) -> str:
        return f"{self.function}() limits what samples add up to, and micro-batches are on different sides of the limit"


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
    sides: tuple[bool, ...] | None
    """Which sides of a limit it is made of; None: there is no limit."""


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
    """Function mode that records small results with a graph, or of those `wanted` whether they are 0, and the sides of
    `limits`."""

    def __init__(self, wanted: Sequence[Idle] | None = None, limits: Sequence[LimitedCall] = ()) -> None:
        super().__init__()
        self.nonzero: dict[Idle, torch.Tensor] = {}
        self.sides: dict[tuple[str, int], torch.Tensor] = {}
        self._wanted = None if wanted is None else frozenset(wanted)
        self._limits = frozenset((limit.function, limit.number) for limit in limits)
        self._calls: Counter[str] = Counter()
        self._found: dict[str, list[_FoundResult | None]] = {}
        self._constant = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (torch.Tensor, tuple, list)) and not _in_transform():
            for made in tensors(result):
                if type(made) is torch.Tensor and made.grad_fn is not None:
                    self._look(func.__name__, made, args, kwargs)
        return result

    def _look(self, function: str, made: torch.Tensor, args: Any, kwargs: Any) -> None:
        number = self._calls[function]
        self._calls[function] += 1
        if self._wanted is None:
            self._found.setdefault(function, []).append(self._recorded(function, tensors((args, kwargs or {})), made))
            return
        if (function, number) in self._limits:
            self.sides[function, number] = _sides(function, tensors((args, kwargs or {})), made)
        for name in (Idle(function, number), Idle(function, None, tuple(made.shape))):
            if name in self._wanted:
                nonzero = made.detach().any()
                self.nonzero[name] = nonzero | self.nonzero[name] if name in self.nonzero else nonzero

    def _recorded(self, function: str, given: Sequence[torch.Tensor], made: torch.Tensor) -> _FoundResult | None:
        if all(isinstance(t, nn.Parameter) or t in self._constant or not (t.requires_grad or t.dim()) for t in given):
            self._constant[made] = True  # the same in every part
            return None
        self._constant.pop(made, None)  # written in place
        if made.numel() > SMALL:
            return None
        of = [t.detach().any() for t in given if t.requires_grad and t.numel() <= SMALL]
        sides = _sides(function, given, made) if _has_limit(function) else None
        shapes = tuple(tuple(t.shape) for t in given)
        return _FoundResult(shapes, tuple(made.shape), made.detach().any(), of, made.grad_fn, sides)

    def of(self, loss: torch.Tensor, samples: int) -> Seen:
        """Return what was recorded, after the loss of `samples` samples was computed."""
        below, divided = _graph_of(loss), denominators(loss)

        def result(each: _FoundResult | None) -> Result | None:
            if each is None:
                return None
            used = each.node in below
            idle = used and not bool(each.nonzero)
            of_zero = idle and not any(map(bool, each.of))
            sides = None if each.sides is None or not used else tuple(each.sides.tolist())
            return Result(each.given, each.shape, used, idle, divided.get(each.node), of_zero, sides)

        return Seen(samples, {function: [*map(result, some)] for function, some in self._found.items()})


@dataclass(frozen=True, eq=False)
class _FoundResult:
    given: tuple[Shape, ...]
    shape: Shape
    nonzero: torch.Tensor
    of: list[torch.Tensor]
    node: Any
    sides: torch.Tensor | None


class IdleSums:
    """Checks in each micro-batch of a pass what the proof of its weighting did not show."""

    def __init__(self, names: Sequence[Idle] = (), limits: Sequence[LimitedCall] = ()) -> None:
        self._names, self._limits, self._looks = names, limits, list[Results]()

    def watching(self) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and loss."""
        if not (self._names or self._limits) or is_faking():
            return nullcontext()
        self._looks.append(Results(self._names, self._limits))
        return self._looks[-1]

    def changed(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return what differs from the proof, or None. Synchronizes once if results are on the device."""
        idle = [name for name in self._names if name.number is not None]
        flags = [(name, look.nonzero.get(name)) for look in self._looks for name in idle]
        flags += [(name, look.nonzero[name]) for look in self._looks for name in self._names if name in look.nonzero]
        flags += [(limit, crossed) for limit in self._limits for crossed in self._crossed(limit)]
        known = [type(flag) is torch.Tensor for _, flag in flags]
        there = [flag for (_, flag), is_known in zip(flags, known) if is_known and flag is not None]
        numbers = iter(read(there, device, dtype))
        changed = (name for (name, _), is_known in zip(flags, known) if not is_known or next(numbers))
        return next(map(str, changed), None)

    def _crossed(self, limit: LimitedCall) -> Iterator[torch.Tensor | None]:
        """Yield for each micro-batch whether it is on another side of a limit than it should be; None: it does not have it."""
        looks = [look.sides.get((limit.function, limit.number)) for look in self._looks]
        there = [sides for sides in looks if sides is not None]
        expected = torch.tensor(limit.sides) if limit.sides is not None else there[0] if there else None
        for sides in looks:
            yield None if sides is None or expected is None else (sides != expected.to(sides.device)).any()


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


def limits_in(whole: Seen, parts: Sequence[Seen], kind: str) -> tuple[LimitedCall, ...]:
    """Return the limits of what several samples make, unless it has an entry for each of them."""
    found = list[LimitedCall]()
    for function, results in whole.results.items():
        rows = [look.results.get(function, []) for look in (whole, *parts)]
        if _has_limit(function) and all(len(row) == len(results) for row in rows):
            for number, same in enumerate(zip(*rows)):
                there = [each for each in same if each is not None and each.sides is not None]
                if len(there) == len(rows) and all(each.given == there[0].given for each in there):
                    found.append(LimitedCall(function, number, there[0].sides if kind == "sum" else None))
    return tuple(found)


def _has_limit(function: str) -> bool:
    return function.strip("_") in LIMITS or function in DISTANCES


def _sides(function: str, given: Sequence[torch.Tensor], made: torch.Tensor) -> torch.Tensor:
    """Return which entries a function with a limit leaves as they are, or which of two is larger."""
    if function in DISTANCES:
        return (given[0] >= given[1]).flatten()
    whole = [each for each in given if each.dtype is made.dtype and each.shape == made.shape]
    return torch.stack([made == each for each in whole]).flatten() if whole else made.new_zeros(0, dtype=torch.bool)


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
    if function not in SUMS or len(per_sample) > 1 or all(look.compares for look in looks):
        return False
    weights = {"samples": [float(look.samples) for look in looks], "sum": [1.0] * len(looks)}.get(kind)
    return weights is not None and _are_proportional(divided, weights)


def _are_proportional(numbers: Sequence[float], weights: Sequence[float]) -> bool:
    each = [number / weight for number, weight in zip(numbers, weights)]
    return max(each) - min(each) <= CLOSE * max(map(abs, each)) < math.inf


def _graph_of(loss: torch.Tensor) -> set[Any]:
    open_, seen = [loss.grad_fn], set[Any]()
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_ += [following for following, _ in node.next_functions]
    return seen


def _in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
