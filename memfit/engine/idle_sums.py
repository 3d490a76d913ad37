"""Finds what a loss makes of several samples and what was 0 in a proof, which therefore shows nothing of how it adds up: a margin
that no sample exceeds yet, a mask that leaves none. A pass checks that it still is 0.

Not covered: compiled code, results with more than `SMALL` entries or with some that are not 0, in-place sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.batches.tree import tensors
from memfit.engine.call_context import is_faking
from memfit.engine.divisors import linear_nodes

SMALL = 64
Name = tuple[str, int]
"""A function and how many times it was called before."""
Shape = tuple[int, ...]
FITTING = {"samples": ("mean", "nanmean"), "sum": ("sum", "nansum")}
"""Functions of entries that belong to one sample each: they add up as a weighting of this kind says, whatever their values."""


@dataclass(frozen=True)
class Result:
    """A small result with a graph, of the loss of `samples` samples."""

    samples: int
    given: tuple[Shape, ...]
    shape: Shape
    idle: bool
    """Whether it is 0, and the loss depends on it and not on parameters alone."""
    linear: bool
    """Whether the loss is linear in what it is made of."""

    @property
    def entries_per_sample(self) -> float:
        """How many entries its first argument has for each sample."""
        return math.prod(self.given[0]) / self.samples

    @property
    def is_of_pairs(self) -> bool:
        """Whether it has an entry for each pair of samples."""
        return self.shape.count(self.samples) > 1


class Results(TorchFunctionMode):
    """Function mode that records small results with a graph. `wanted`: whether these are 0 alone, of any size."""

    def __init__(self, wanted: Sequence[Name] | None = None) -> None:
        super().__init__()
        self.nonzero: dict[Name, torch.Tensor] = {}
        self._wanted = wanted
        self._calls: Counter[str] = Counter()
        self._found: dict[Name, tuple[tuple[Shape, ...], Shape, Any]] = {}
        self._constant = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and result.grad_fn is not None and not _in_transform():
            name = func.__name__, self._calls[func.__name__]
            self._calls[func.__name__] += 1
            if self._wanted is None:
                self._record(name, tensors((args, kwargs or {})), result)
            elif name in self._wanted:
                self.nonzero[name] = result.detach().any()
        return result

    def _record(self, name: Name, given: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        if all(isinstance(t, nn.Parameter) or t in self._constant or not (t.requires_grad or t.dim()) for t in given):
            self._constant[result] = True  # the same in every part
        elif result.numel() <= SMALL:
            self._constant.pop(result, None)  # written in place
            self.nonzero[name] = result.detach().any()
            self._found[name] = tuple(tuple(t.shape) for t in given), tuple(result.shape), result.grad_fn

    def of(self, loss: torch.Tensor, samples: int) -> dict[Name, Result]:
        """Return what was recorded and is 0, after the loss of `samples` samples was computed."""
        zero = {name for name, nonzero in self.nonzero.items() if not bool(nonzero)}
        below, linear = (_graph_of(loss), set(linear_nodes(loss))) if zero else (set[Any](), set[Any]())
        found = ((name, each) for name, each in self._found.items() if name in zero)
        return {
            name: Result(samples, given, shape, node in below, node in linear) for name, (given, shape, node) in found
        }


class IdleSums:
    """Checks in each micro-batch of a pass what was 0 in the proof of its weighting."""

    def __init__(self, names: Sequence[Name]) -> None:
        self._names, self._looks = names, list[Results]()

    def watching(self) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and loss."""
        if not self._names or is_faking():
            return nullcontext()
        self._looks.append(Results(self._names))
        return self._looks[-1]

    def changed(self) -> str | None:
        """Return what differs from the proof, or None. Synchronizes if the sums are on a device."""
        there = [look.nonzero.get(name) for look in self._looks for name in self._names]
        found = [nonzero for nonzero in there if nonzero is not None and type(nonzero) is torch.Tensor]
        if len(found) == len(there) and (not found or not bool(torch.stack(found).any())):
            return None
        return f"{self._names[0][0]}() is no longer 0, as it was when the loss was proven"


def idle_in(whole: dict[Name, Result], parts: Sequence[dict[Name, Result]], kind: str) -> tuple[Name, ...]:
    """Return what several samples make that is 0 in a whole and in its parts, unless any values of it fit this kind of
    weighting."""
    there = {name: [one, *(part[name] for part in parts)] for name, one in whole.items() if all(name in p for p in parts)}
    return tuple(name for name, found in there.items() if _is_of_several(found) and not _fits(name, found, kind))


def _is_of_several(found: Sequence[Result]) -> bool:
    """Whether these results are idle, and have entries that belong to no sample alone."""
    whole, *parts = found
    one_shape = all(part.shape == whole.shape for part in parts)
    return all(each.idle for each in found) and (one_shape or all(each.is_of_pairs for each in found))


def _fits(name: Name, found: Sequence[Result], kind: str) -> bool:
    whole, *parts = found
    if not all(each.linear for each in found):
        return False
    if all(part.given == whole.given for part in parts):
        return True  # what it is made of counts
    return name[0] in FITTING.get(kind, ()) and len({each.entries_per_sample for each in found}) == 1


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
