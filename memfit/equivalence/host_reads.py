"""Detects data-dependent control flow: a forward or loss that reads batch values on the host and branches on them.

`if x.abs().max() > c`, `if loss > 1` or `if (y == 2).sum() > 2` may agree on a proof's few samples, and differ between the
parts and the whole of a later batch. The sign is a read (`.item()`) of a comparison or number computed from the batch. Reads
once per sample do not count, nor do those that differ between whole and parts while the results agree. Of integers, only counts
of entries are looked at (`int(mask.sum()) > 2`). Whether there are any, and what else is read, is compared while training
(`engine/branches.py`).
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.engine.batch_limits import NO_LIMITS
from memfit.engine.branches import Branches
from memfit.engine.user_line import line_of_script

Value = float | bool | int
aten = torch.ops.aten
_COMPARING = frozenset(getattr(aten, name) for name in ("gt", "lt", "ge", "le"))
_FINITE = frozenset(getattr(aten, name) for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf"))
_COUNTING = frozenset((aten.sum, aten.count_nonzero))
_READING = aten._local_scalar_dense
COUNTED, DECIDING = 1, 2
"""Marks of a count of entries, and of a comparison of numbers. 0 marks anything else computed from the batch."""
Replaced = tuple[frozenset[int], Callable[[Any], Value]]
"""Which reads are replaced, and by what."""
MOST = 4
"""Number of places that read, of which are tried. One place may read often (the argument checks of a distribution)."""
FAR = 1e30
"""Replaces a number that is read, with either sign, to see whether the result depends on it."""
MANY = 4096
"""Is added to a count that is read. It may be the size of a tensor."""
_OTHERS: dict[type, Sequence[Callable[[Any], Value]]] = {
    bool: (lambda held: not held,),
    float: (lambda _: FAR, lambda _: -FAR),
}


class Reads(TorchDispatchMode):
    """Records reads of batch values while active: `reads` has comparisons and numbers, `taken` (the comparison, the line that
    reads it), `places` the code that reads each. `limits` and `branches` are those of the same run. `put` replaces some of
    `reads`."""

    def __init__(self, put: Replaced | None = None) -> None:
        super().__init__()
        self.taken: list[tuple[bool, str]] = []
        self.reads: list[Value] = []
        self.places: list[tuple[Any, int]] = []
        self.limits, self.branches = NO_LIMITS, Branches(self.may_tell)
        self._left = False
        self._put = put
        self._of_batch = WeakTensorKeyDictionary()

    def of(self, inputs: Iterable[torch.Tensor]) -> Reads:
        """Marks these tensors as the batch; returns self."""
        for tensor in inputs:
            self._of_batch[tensor] = 0
        return self

    def may_tell(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may depend on values of the batch: it was computed from them, or a number was read of them."""
        return self._left or tensor in self._of_batch

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
            self._left = True
            return self._read(args[0], out, marks[0])
        mark = _mark(packet, args, max(marks))
        for tensor in _tensors(out):
            self._of_batch[tensor] = mark
        return out

    def _read(self, tensor: torch.Tensor, value: Any, mark: int) -> Any:
        if tensor.dtype is torch.bool and mark == DECIDING:
            self.taken.append((value, line_of_script()))
        elif not (tensor.is_floating_point() or (mark == COUNTED and type(value) is int)):
            return value
        index, frame = len(self.reads), sys._getframe(2)
        self.reads.append(value)
        self.places.append((frame.f_code, frame.f_lineno))
        if self._put is None or index not in self._put[0]:
            return value
        return self._put[1](value)


def _mark(packet: Any, args: Any, given: int) -> int:
    if packet in _FINITE:
        return 0
    if packet in _COMPARING:
        infinite = any(type(value) is float and math.isinf(value) for value in args[1:])
        return DECIDING if not infinite and (given or args[0].is_floating_point()) else 0
    if packet in _COUNTING and not args[0].is_floating_point():
        return COUNTED
    return given


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return _tensors(list(tree.values()))
    return [tensor for item in tree for tensor in _tensors(item)] if isinstance(tree, (list, tuple)) else []


def decided(
    whole: Reads, parts: Sequence[Reads], run: Callable[[Replaced], Any], same: Callable[[Any], bool]
) -> str | None:
    """Returns the line whose comparison of batch values decides, or a note for a number; None if whole and parts show none.
    `run` reruns the whole with some reads replaced. `same` tells whether its result is unchanged. A check that only raises
    decides nothing."""
    line = _compared(whole.taken, [part.taken for part in parts])
    reads = defaultdict[Any, set[int]](set)
    for index, (read, place) in enumerate(zip(whole.reads, whole.places)):
        if line is not None or not isinstance(read, bool):
            reads[place, type(read)].add(index)
    for (_, kind), indices in list(reads.items())[:MOST]:
        hangs_on = partial(_hangs_on, frozenset(indices), run, same)
        if kind is int:  # what is divided by a count hangs on every other count as well
            decides = hangs_on(lambda count: count + MANY) and not hangs_on(lambda count: count + 1)
        else:
            decides = any(map(hangs_on, _OTHERS[kind]))
        if decides:
            return line or "a number that is read"
    return line if len(reads) > MOST else None


def _compared(mine: Sequence[tuple[bool, str]], theirs: Sequence[Sequence[tuple[bool, str]]]) -> str | None:
    """Return the line of a comparison with equal results for whole and parts, which may be chance."""
    if not mine or [value for part in theirs for value, _ in part] == [value for value, _ in mine]:
        return None  # one read per sample
    alike = all([value for value, _ in part] == [value for value, _ in mine] for part in theirs)
    return mine[0][1] or "a comparison" if alike else None


def _hangs_on(
    reads: frozenset[int], run: Callable[[Replaced], Any], same: Callable[[Any], bool], other: Callable[[Any], Value]
) -> bool:
    """Whether the result changes if other values are read. A run that fails tells nothing."""
    try:
        with redirect_stdout(None), redirect_stderr(None):
            made = run((reads, other))
        return not same(made)
    except (Exception, SystemExit):
        return False
