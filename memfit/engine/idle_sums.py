"""Finds what a loss sums over samples and what was 0 in a proof, which therefore shows nothing of how it adds up: a margin that
no sample exceeds yet, a mask that leaves none. A pass checks that it still is 0.

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
from torch.overrides import TorchFunctionMode

from memfit.batches.tree import tensors
from memfit.engine.call_context import is_faking

SMALL = 64
Name = tuple[str, int]
"""A function and how many times it was called before."""
Shapes = tuple[tuple[int, ...], ...]
FITTING = {"samples": ("mean", "nanmean"), "sum": ("sum", "nansum")}
"""Functions of entries that belong to one sample each: they add up as a weighting of this kind says, whatever their values."""


@dataclass(frozen=True)
class Summed:
    """A small result that a loss is computed from."""

    samples: int
    given: Shapes
    shape: tuple[int, ...]
    idle: bool
    """Whether it is 0, and a term of the loss depends on it."""

    @property
    def entries_per_sample(self) -> float:
        """How many entries its first argument has for each sample."""
        return math.prod(self.given[0]) / self.samples


class Sums(TorchFunctionMode):
    """Function mode that records small results with a graph, of arguments with more entries or dimensions."""

    def __init__(self, wanted: Sequence[Name] | None = None) -> None:
        super().__init__()
        self.nonzero: dict[Name, torch.Tensor] = {}
        self._wanted = wanted
        self._calls: Counter[str] = Counter()
        self._found: dict[Name, tuple[Shapes, tuple[int, ...], Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and result.grad_fn is not None and result.numel() <= SMALL and not _in_transform():
            given = [tensor for tensor in tensors((args, kwargs or {})) if isinstance(tensor, torch.Tensor)]
            if any(each.numel() > result.numel() or each.dim() > result.dim() for each in given):
                self._look(func.__name__, given, result)
        return result

    def _look(self, function: str, given: list[torch.Tensor], result: torch.Tensor) -> None:
        name = function, self._calls[function]
        self._calls[function] += 1
        if self._wanted is None or name in self._wanted:
            self.nonzero[name] = result.detach().any()
        if self._wanted is None:
            self._found[name] = tuple(tuple(t.shape) for t in given), tuple(result.shape), result.grad_fn

    def of(self, loss: torch.Tensor, samples: int) -> dict[Name, Summed]:
        """Return what was recorded, after the loss of `samples` samples was computed."""
        zero = {name for name, nonzero in self.nonzero.items() if not bool(nonzero)}
        below = _graph_of(loss) if zero else set()
        return {
            name: Summed(samples, given, shape, name in zero and node in below)
            for name, (given, shape, node) in self._found.items()
        }


class IdleSums:
    """Checks in each micro-batch of a pass what was 0 in the proof of its weighting."""

    def __init__(self, names: Sequence[Name]) -> None:
        self._names, self._looks = names, list[Sums]()

    def watching(self) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and loss."""
        if not self._names or is_faking():
            return nullcontext()
        self._looks.append(Sums(self._names))
        return self._looks[-1]

    def changed(self) -> str | None:
        """Return what differs from the proof, or None. Synchronizes if the sums are on a device."""
        there = [look.nonzero.get(name) for look in self._looks for name in self._names]
        found = [nonzero for nonzero in there if nonzero is not None and type(nonzero) is torch.Tensor]
        if len(found) == len(there) and (not found or not bool(torch.stack(found).any())):
            return None
        return f"{self._names[0][0]}() of samples is no longer 0, as it was when the loss was proven"


def idle_in(whole: dict[Name, Summed], parts: Sequence[dict[Name, Summed]], kind: str) -> tuple[Name, ...]:
    """Return the sums over samples that are 0 in a whole and in its parts, unless any values fit this kind of weighting."""
    return tuple(
        name
        for name, summed in whole.items()
        if summed.idle
        and _is_over_samples(summed, same := [part[name] for part in parts if name in part])
        and not _fits(name, [summed, *same], kind)
    )


def _is_over_samples(whole: Summed, parts: Sequence[Summed]) -> bool:
    alike = all(part.idle and part.shape == whole.shape for part in parts)
    return alike and any(part.given != whole.given for part in parts)


def _fits(name: Name, sums: Sequence[Summed], kind: str) -> bool:
    return name[0] in FITTING.get(kind, ()) and len({each.entries_per_sample for each in sums}) == 1


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
