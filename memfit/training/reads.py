"""Values of the batch that decide: a forward or a loss that looks at them on the host, and computes something else by them.

`if x.abs().max() > c`, `if loss > 1`, `if (y == 2).sum() > 2` may come out alike on the few samples of a proof, and otherwise
for the parts of a later batch than for the whole. They are told by what is read: a comparison of numbers computed from it.
Reads for each sample in turn are none, nor is what came out differently for whole and parts while the results agreed. Not
covered: whole numbers read as such (`int(lengths.max())`), whether any or all entries of a mask or of labels are set, and
whether entries are equal to a number, which makes masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.training.where import line_of_script

aten = torch.ops.aten
_COMPARING = frozenset(getattr(aten, name) for name in ("gt", "lt", "ge", "le"))
_FINITE = frozenset(getattr(aten, name) for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf"))
_COUNTING = frozenset((aten.sum, aten.count_nonzero))
_READING = aten._local_scalar_dense
DECIDING = 2
"""A comparison of numbers; 1: a count of entries; 0: anything else of the batch."""
MOST = 4
"""Numbers that are looked at."""
FAR = 1e30
"""What is put in the place of a number that is read, either way, to see whether anything hangs on it."""


class Reads(TorchDispatchMode):
    """Notes comparisons of the batch that are read while active: `taken` has (what was read, the line that reads it), `numbers`
    counts the numbers read. `put` is given in the place of the n-th of these."""

    def __init__(self, put: tuple[int, float] | None = None) -> None:
        super().__init__()
        self.taken: list[tuple[bool, str]] = []
        self.numbers = 0
        self._put = put
        self._of_batch = WeakTensorKeyDictionary()

    def of(self, inputs: Iterable[torch.Tensor]) -> Reads:
        """Itself, for what is computed from these."""
        for tensor in inputs:
            self._of_batch[tensor] = 0
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        marks = [self._of_batch[t] for t in _tensors((args, kwargs)) if t in self._of_batch]
        if not marks:
            return out
        packet = func.overloadpacket
        if packet is _READING:
            return self._read(args[0], out, marks[0])
        mark = _mark(packet, args, max(marks))
        for tensor in _tensors(out):
            self._of_batch[tensor] = mark
        return out

    def _read(self, tensor: torch.Tensor, value: Any, mark: int) -> Any:
        if tensor.dtype is torch.bool and mark == DECIDING:
            self.taken.append((value, line_of_script()))
        elif tensor.is_floating_point():
            self.numbers += 1
            if self._put is not None and self._put[0] == self.numbers:
                return self._put[1]
        return value


def _mark(packet: Any, args: Any, given: int) -> int:
    if packet in _FINITE:
        return 0
    if packet in _COMPARING:
        infinite = any(type(value) is float and math.isinf(value) for value in args[1:])
        return DECIDING if not infinite and (given or args[0].is_floating_point()) else 0
    if packet in _COUNTING and not args[0].is_floating_point():
        return 1
    return given


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return _tensors(list(tree.values()))
    return [tensor for item in tree for tensor in _tensors(item)] if isinstance(tree, (list, tuple)) else []


def decided(whole: Reads, parts: Sequence[Reads]) -> str | None:
    """The line that decides by a comparison of values of the batch; None where none does as far as whole and parts tell."""
    mine, theirs = whole.taken, [part.taken for part in parts]
    if not mine or [value for part in theirs for value, _ in part] == [value for value, _ in mine]:
        return None  # for each sample in turn
    alike = all([value for value, _ in part] == [value for value, _ in mine] for part in theirs)
    return mine[0][1] or "a comparison" if alike else None


def decided_by_number(count: int, run: Callable[[tuple[int, float]], Any], same: Callable[[Any], bool]) -> bool:
    """Whether anything else comes of a run where one of the numbers that it reads is another one; what fails then says
    nothing."""
    for index in range(1, min(count, MOST) + 1):
        for value in (FAR, -FAR):
            try:
                with redirect_stdout(None), redirect_stderr(None):
                    made = run((index, value))
                if not same(made):
                    return True
            except (Exception, SystemExit):
                continue
    return False
