"""Watches limits of what several samples make: `relu(mean - c)`, `largest.clamp(min=c)`, a running count up to a capacity.

The few samples of a proof are on one side of such a limit, or do not reach it; then the parts of the proof agree with the whole
although the limit mixes samples. Each micro-batch must be on the same side: a mean of what is on one side is on that side, too.
What the limit made constant in the proof must be the same number in all micro-batches. Limits that micro-batches cannot reach
where their batch does (of a norm, of a running count) are named by `unreachable_in`.

Not covered: compiled code, custom autograd functions, what goes through NumPy or Python numbers, and results with more than
`SMALL` entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.batches.tree import tensors
from memfit.engine.call_context import is_faking
from memfit.engine.idle_sums import Shape, first_set, in_transform
from memfit.engine.known_means import answering, nodes_of

SMALL = 1 << 12
LIMITS = frozenset(
    "relu relu6 clamp clamp_min clamp_max clip minimum maximum max min where hardtanh threshold abs absolute fabs fmax fmin "
    "leaky_relu prelu hardshrink".split()
)
"""Functions of single entries, of which they return some unchanged."""
DISTANCES = frozenset("l1_loss smooth_l1_loss huber_loss margin_ranking_loss".split())
"""Functions of the absolute value of a difference."""
COMPARING = frozenset("gt ge lt le greater greater_equal less less_equal".split())
RUNNING = frozenset("cumsum cumprod cummax cummin logcumsumexp".split())
"""Functions whose results for a sample depend on the samples before it."""
GROWING = frozenset("norm vector_norm linalg_norm linalg_vector_norm std var std_mean var_mean count_nonzero".split())
"""Statistics that may be larger for a batch than for any part of it."""


class LimitedCall(NamedTuple):
    """The `number`-th call of a function with a limit, for something made of several samples."""

    function: str
    number: int
    alike: bool
    """Whether the result must be the same in all micro-batches; else they must be on the same side of the limit."""
    sides: tuple[bool, ...]
    """The sides that the proof's samples were on. A sum of what is on one side may be on the other."""

    def __str__(self) -> str:
        return f"{self.function}() limits what samples make together, and micro-batches are on different sides of the limit"


Name = tuple[str, int]


@dataclass(frozen=True, eq=False)
class _Found:
    """The result of a call that depends on the batch."""

    given: tuple[Shape, ...]
    value: torch.Tensor
    sides: torch.Tensor
    has_graph: bool
    of: frozenset[Name]
    """The limits and statistics without a graph that it is made of."""
    node: Any = None
    """The end of its graph, while a forward is recorded: what is kept longer would keep the activations alive."""


@dataclass(frozen=True)
class SeenLimits:
    """The limited calls of a forward and its loss, by function, in order. None: it does not depend on the batch, or nothing
    depends on it."""

    calls: dict[str, list[_Found | None]]
    counts: bool
    """Whether the outputs depend on the limit of a running count that no sample is beyond, or all are."""


NO_LIMITS = SeenLimits({}, counts=False)


@dataclass(eq=False)
class Limits(TorchFunctionMode):
    """Function mode that records the limited calls of `samples` samples, whose tensors are `inputs`; with `wanted`, only
    these."""

    samples: int = 0
    inputs: Sequence[torch.Tensor] = ()
    wanted: frozenset[Name] | None = None
    seen: dict[Name, _Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()
        self._found: dict[str, list[_Found | None]] = {}
        self._users: list[tuple[Any, frozenset[Name]]] = []
        self._of, self._constant = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._compared: list[torch.Tensor] = []
        for tensor in self.inputs:
            self._of[tensor] = frozenset[Name]()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if in_transform():
            return result
        name = func.__name__.strip("_")
        given = [t for t in tensors((args, kwargs or {})) if type(t) in (torch.Tensor, nn.Parameter)]
        made = tensors(result) if isinstance(result, (torch.Tensor, tuple, list)) else given[:1] if name == "setitem" else []
        made = [t for t in made if type(t) is torch.Tensor]
        if made and self.wanted is None:
            self._follow(name, given, made)
        elif made and _is_limited(name):
            number = self._number(name)
            if self.wanted is not None and (name, number) in self.wanted:
                self.seen[name, number] = _found(name, given, made[0], frozenset())
        return result

    def of(self, outputs: Sequence[torch.Tensor]) -> SeenLimits:
        """Return what was recorded, as far as `outputs` depend on it."""
        below = set(nodes_of(outputs))
        used = frozenset(name for node, names in self._users if node in below for name in names)

        def is_used(function: str, number: int, found: _Found) -> bool:
            return found.node in below if found.has_graph else (function, number) in used

        calls = {
            function: [
                replace(each, node=None) if each is not None and is_used(function, i, each) else None
                for i, each in enumerate(some)
            ]
            for function, some in self._found.items()
        }
        reached = [bool(each.any()) and not bool(each.all()) for each in self._compared]
        return SeenLimits(calls, any(("compared", i) in used and not each for i, each in enumerate(reached)))

    def at(self, call: LimitedCall) -> torch.Tensor | None:
        """Return what must be the same in all micro-batches. None: there was no such call."""
        found = self.seen.get((call.function, call.number))
        return None if found is None else found.value if call.alike else found.sides

    def _number(self, function: str) -> int:
        self._calls[function] += 1
        return self._calls[function] - 1

    def _follow(self, function: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        number = self._number(function) if _is_limited(function) else -1
        if not any(t in self._of or self._is_computed(t) for t in given):
            for tensor in made:
                self._constant[tensor] = True
                self._of.pop(tensor, None)
            if number >= 0:
                self._found.setdefault(function, []).append(None)
            return
        names = frozenset[Name]().union(*(self._of[t] for t in given if t in self._of))
        if number >= 0:
            is_small = 0 < made[0].numel() <= SMALL
            found = replace(_found(function, given, made[0], names), node=made[0].grad_fn) if is_small else None
            self._found.setdefault(function, []).append(found)
        names |= self._also(function, number, given, made[0], names)
        for tensor in made:
            self._constant.pop(tensor, None)
            if tensor.grad_fn is not None and names:
                self._users.append((tensor.grad_fn, names))
            self._of[tensor] = names

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with a graph that no call made here may depend on the batch."""
        return tensor.grad_fn is not None and tensor not in self._constant

    def _also(
        self, function: str, number: int, given: Sequence[torch.Tensor], made: torch.Tensor, names: frozenset[Name]
    ) -> frozenset[Name]:
        """The names of what this call adds to those that its result is made of."""
        if number >= 0:
            return frozenset([(function, number)])
        if function in GROWING and self.samples in given[0].shape and self.samples not in made.shape:
            return frozenset([("statistic", 0)])
        if function in RUNNING and given[0].dim() and given[0].shape[0] == self.samples and made.shape == given[0].shape:
            return frozenset([("running", 0)])
        if function in COMPARING and ("running", 0) in names and 0 < made.numel() <= SMALL:
            self._compared.append(made.detach().clone())
            return frozenset([("compared", len(self._compared) - 1)])
        return frozenset()


def _is_limited(function: str) -> bool:
    return (function in LIMITS or function in DISTANCES) and not answering()


def _found(function: str, given: Sequence[torch.Tensor], made: torch.Tensor, names: frozenset[Name]) -> _Found:
    if function in DISTANCES:
        sides = (given[0] >= given[1]).flatten()
    else:
        whole = [each for each in given if each.dtype is made.dtype and each.shape == made.shape]
        sides = torch.stack([made == each for each in whole]).flatten() if whole else made.new_zeros(0, dtype=torch.bool)
    return _Found(tuple(tuple(t.shape) for t in given), made.detach().clone(), sides, made.grad_fn is not None, names)


def limits_in(whole: SeenLimits, parts: Sequence[SeenLimits]) -> tuple[LimitedCall, ...]:
    """Return the limits of what several samples make, unless it has an entry for each of them."""
    return tuple(
        LimitedCall(function, number, alike, tuple(found[0].sides.tolist()))
        for function, number, found, alike in _limited(whole, parts)
    )


def unreachable_in(whole: SeenLimits, parts: Sequence[SeenLimits]) -> str | None:
    """Return the limit that parts of a batch cannot reach where the batch does, if the proof did not reach it."""
    if whole.counts:
        return "a limit of a running count"
    for function, _, found, alike in _limited(whole, parts):
        if alike and ("statistic", 0) in found[0].of:
            return f"{function}() of a norm, a deviation or a count"
    return None


def _limited(whole: SeenLimits, parts: Sequence[SeenLimits]) -> Iterator[tuple[str, int, list[_Found], bool]]:
    for function, calls in whole.calls.items():
        rows = [look.calls.get(function, []) for look in (whole, *parts)]
        if all(len(row) == len(calls) for row in rows):
            for number, same in enumerate(zip(*rows)):
                there = [each for each in same if each is not None]
                if len(there) == len(rows) and len({(each.given, each.value.shape) for each in there}) == 1:
                    yield function, number, there, all(torch.equal(each.value, there[0].value) for each in there)


class LimitChecks:
    """Checks the limited calls of a proof in each micro-batch of a pass. `sums`: the loss is a sum over samples."""

    def __init__(self, calls: Sequence[LimitedCall] = (), *, sums: bool = False) -> None:
        self._calls, self._sums, self._looks = calls, sums, list[Limits]()

    def watching(self) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and loss."""
        if not self._calls or is_faking():
            return nullcontext()
        self._looks.append(Limits(wanted=wanted(self._calls)))
        return self._looks[-1]

    def changed(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return what differs from the proof, or None. Synchronizes once if results are on the device."""
        return first_set([(call, flag) for call in self._calls for flag in self._crossed(call)], device, dtype)

    def _crossed(self, call: LimitedCall) -> Iterator[torch.Tensor | None]:
        """Yield for each micro-batch whether it is elsewhere than it should be; None: it has no such call."""
        found = [look.at(call) for look in self._looks]
        there = [each for each in found if each is not None]
        expected = torch.tensor(call.sides) if self._sums and not call.alike else there[0] if there else None
        for each in found:
            yield None if each is None or expected is None else _differs(each, expected.to(each.device))


def wanted(calls: Sequence[LimitedCall]) -> frozenset[Name]:
    """Return the names of calls."""
    return frozenset((call.function, call.number) for call in calls)


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    return (one != other).any() if one.shape == other.shape else None
