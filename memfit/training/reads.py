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

Value = float | bool
aten = torch.ops.aten
_COMPARING = frozenset(getattr(aten, name) for name in ("gt", "lt", "ge", "le"))
_FINITE = frozenset(getattr(aten, name) for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf"))
_COUNTING = frozenset((aten.sum, aten.count_nonzero))
_READING = aten._local_scalar_dense
DECIDING = 2
"""A comparison of numbers; 1: a count of entries; 0: anything else of the batch."""
MOST = 4
"""Reads that are looked at."""
FAR = 1e30
"""What is put in the place of a number that is read, either way, to see whether anything hangs on it."""


class Reads(TorchDispatchMode):
    """Notes what is read of the batch while active: `reads` has comparisons and numbers, `taken` (the comparison, the line
    that reads it). `put` is given in the place of the n-th of `reads`."""

    def __init__(self, put: tuple[int, Value] | None = None) -> None:
        super().__init__()
        self.taken: list[tuple[bool, str]] = []
        self.reads: list[Value] = []
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
        elif not tensor.is_floating_point():
            return value
        self.reads.append(value)
        return self._put[1] if self._put is not None and self._put[0] == len(self.reads) - 1 else value


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


def decided(
    whole: Reads, parts: Sequence[Reads], run: Callable[[tuple[int, Value]], Any], same: Callable[[Any], bool]
) -> str | None:
    """The line that decides by a comparison of values of the batch, or that a number does which it reads; None where none does
    as far as whole and parts tell. `run` gives what comes of the whole where the n-th of these reads is another one, `same`
    tells whether that is what came of it: a check that only raises decides nothing."""
    line = _compared(whole.taken, [part.taken for part in parts])
    reads = [(index, read) for index, read in enumerate(whole.reads) if line is not None or not isinstance(read, bool)]
    for index, read in reads[:MOST]:
        others = (not read,) if isinstance(read, bool) else (FAR, -FAR)
        if any(_hangs_on(index, other, run, same) for other in others):
            return line or "a number that is read"
    return line if len(reads) > MOST else None


def _compared(mine: Sequence[tuple[bool, str]], theirs: Sequence[Sequence[tuple[bool, str]]]) -> str | None:
    """The line of a comparison that came out alike for whole and parts, which may be chance."""
    if not mine or [value for part in theirs for value, _ in part] == [value for value, _ in mine]:
        return None  # for each sample in turn
    alike = all([value for value, _ in part] == [value for value, _ in mine] for part in theirs)
    return mine[0][1] or "a comparison" if alike else None


def _hangs_on(index: int, value: Value, run: Callable[[tuple[int, Value]], Any], same: Callable[[Any], bool]) -> bool:
    """Whether anything else comes of a run that reads this value; what fails then says nothing."""
    try:
        with redirect_stdout(None), redirect_stderr(None):
            made = run((index, value))
        return not same(made)
    except (Exception, SystemExit):
        return False
