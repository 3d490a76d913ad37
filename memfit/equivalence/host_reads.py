"""Detects data-dependent control flow: a forward or loss that reads batch values on the host and branches on them.

`if x.abs().max() > c`, `if loss > 1` or `if (y == 2).sum() > 2` may agree on a proof's few samples, and differ between the
parts and the whole of a later batch. The sign is a read (`.item()`) of a comparison or number computed from the batch. Reads
once per sample do not count, nor do those that differ between whole and parts while the results agree. Of integers, only counts
of entries are looked at: whether results change past some count (`int(mask.sum()) > 2`, `len(mask.nonzero()) > 2`). Whether
there are any, and what else is read, is compared while training (`engine/branches.py`).
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.engine.batch_limits import NO_LIMITS
from memfit.engine.branches import CallsMade, Made, Site
from memfit.engine.gradients import is_sharded
from memfit.engine.user_line import line_of_script
from memfit.equivalence.value_reads import ValueReads, asking_frame

T = TypeVar("T")
Value = float | bool | int
aten = torch.ops.aten
_COMPARING = frozenset(getattr(aten, name) for name in ("gt", "lt", "ge", "le"))
_FINITE = frozenset(getattr(aten, name) for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf"))
_COUNTING = frozenset((aten.sum, aten.count_nonzero))
_READING = aten._local_scalar_dense
FINITE, COUNTED, DECIDING = -1, 1, 2
"""Marks of a check of numbers for being finite, of a count of entries, and of a comparison of numbers. 0 marks anything else
computed from the batch."""
Read = tuple[tuple[Any, int], type]
"""Reads of one kind: the code and the line that read, and the type of what is read."""
Replaced = tuple[Read, Callable[[Any], Value]]
"""Which reads are replaced, and by what."""
MOST = 4
"""Number of places that read, of which are tried. One place may read often (the argument checks of a distribution)."""
AGAIN = 64
"""Times that a place reads another value in one run."""
FAR = 1e30
"""Replaces a number that is read, with either sign, to see whether the result depends on it."""
SOME, MANY = 64, 256
"""Are added to an integer that is read, and to one that counts entries. They may be sizes of tensors, in several dimensions."""
_OTHERS: dict[type, Sequence[Callable[[Any], Value]]] = {
    bool: (lambda held: not held,),
    float: (lambda _: FAR, lambda _: -FAR),
    int: (lambda count: count + 1, lambda _: 0, lambda count: count + SOME),
}


class Again(NamedTuple):
    """The whole of a proof, to be run again with other reads: what it gave (`made`), and whether two results are the `same`."""

    made: Any
    run: Callable[[Reads], Any]
    same: Callable[[Any, Any], bool]


class Reads(TorchDispatchMode):
    """Records reads of batch values while active: `taken` has (a comparison, the line that reads it), `marks` what is read by
    each place, `by_script` the lines of the script that read. `limits`, `branches` and the places that `moved` are those of the
    same run. `put` replaces some of what is read."""

    def __init__(self, put: Replaced | None = None) -> None:
        super().__init__()
        self.taken: list[tuple[bool, str]] = []
        self.marks = defaultdict[Read, set[int]](set)
        self.by_script = defaultdict[Read, set[int]](set)
        self._left_to_put = AGAIN
        self.moved = frozenset[tuple[Any, ...]]()
        self.limits, self.branches = NO_LIMITS, ValueReads(self.may_tell, self._sized)
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
        frame = sys._getframe(2)
        asking, read = asking_frame(frame), ((frame.f_code, frame.f_lineno), type(value))
        self.marks[read].add(mark)
        known = [read]
        if asking is not None:
            known.append(((asking.f_code, asking.f_lineno), type(value)))
            self.by_script[known[-1]].add(mark)
        return self._replaced(known, value)

    def _sized(self, frame: FrameType, size: int) -> int:
        read = (frame.f_code, frame.f_lineno), int
        self.by_script[read].add(COUNTED)
        return self._replaced([read], size)

    def _replaced(self, known: Sequence[Read], value: Any) -> Any:
        if self._put is None or self._put[0] not in known or not self._left_to_put:
            return value
        self._left_to_put -= 1  # a loop that runs until it reads something else has to end
        return self._put[1](value)


def noting_moves(reads: Reads, made: T, moved: Iterable[tuple[Any, ...]]) -> T:
    """Return what a run made, after noting the places that it moved."""
    reads.moved = frozenset(moved)
    return made


def _mark(packet: Any, args: Any, given: int) -> int:
    if packet in _FINITE:
        return FINITE
    if packet in _COMPARING:
        infinite = any(type(value) is float and math.isinf(value) for value in args[1:])
        return DECIDING if not infinite and (given > 0 or args[0].is_floating_point()) else 0
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
    whole: Reads, parts: Sequence[Reads], again: Again, *, tried: Collection[type] = (bool, int)
) -> str | None:
    """Returns the line whose comparison of batch values decides, or a note for a number; None if whole and parts show none.
    A check that only raises decides nothing. `tried` has int if counts that are read as integers may be replaced, too."""
    line = _compared(whole.taken, [part.taken for part in parts])

    def is_tried(kind: type, mark: int) -> bool:
        return (line is not None and mark == DECIDING) if kind is bool else kind is float

    reads = [read for read, marks in whole.marks.items() if any(is_tried(read[1], mark) for mark in marks)]
    reads += [read for read, marks in whole.by_script.items() if read[1] is int and int in tried and COUNTED in marks]
    for read in reads[:MOST]:
        hangs_on = _is_threshold if read[1] is int else _changes
        if hangs_on(read, again):
            return line or "a number that is read"
    return line if len(reads) > MOST else None


def _compared(mine: Sequence[tuple[bool, str]], theirs: Sequence[Sequence[tuple[bool, str]]]) -> str | None:
    """Return the line of a comparison with equal results for whole and parts, which may be chance."""
    if not mine or [value for part in theirs for value, _ in part] == [value for value, _ in mine]:
        return None  # one read per sample
    alike = all([value for value, _ in part] == [value for value, _ in mine] for part in theirs)
    return mine[0][1] or "a comparison" if alike else None


def _changes(read: Read, again: Again) -> bool:
    """Whether the result changes if other values are read. A run that fails tells nothing."""
    results = (_result(read, again, other) for other in _OTHERS[read[1]])
    return any(found is not None and not again.same(again.made, found) for found in results)


def _is_threshold(read: Read, again: Again) -> bool:
    """Whether the result changes once a count passes some number above 1, which that of a whole batch may do alone. What is
    divided by a count changes with every count, a guard (`if count:`) at 0, and a trim (`x[:, :count]`) with all lower ones."""

    def result(value: Callable[[int], int]) -> Any:
        return _result(read, again, value)

    def same(one: Any, other: Any) -> bool:
        return one is not None and other is not None and again.same(one, other)

    many, more = result(lambda count: count + MANY), result(lambda count: count + 2 * MANY)
    if not same(many, more):
        return False
    if same(again.made, many):
        lower = result(lambda count: max(0, count - 1))
        if not same(lower, many) and not same(result(lambda count: max(0, count - 2)), lower):
            return False
    one = result(lambda _: 1)
    if one is None or same(one, many):
        return False
    two = result(lambda _: 2)
    return same(one, two) or same(two, result(lambda _: 3))


def _result(read: Read, again: Again, other: Callable[[Any], Value]) -> Any:
    found = _with_others(read, again.run, other)
    return None if found is None else found[1]


def _with_others(read: Read, run: Callable[[Reads], Any], other: Callable[[Any], Value]) -> tuple[Reads, Any] | None:
    """Return what a run shows and its result if other values are read, or None if that fails."""
    look = Reads((read, other))
    try:
        with redirect_stdout(None), redirect_stderr(None):
            made = run(look)
    except (Exception, SystemExit):
        return None
    return look, made


def may_branch(whole: Reads, again: Again, tried: Collection[type] = (bool, int)) -> bool:
    """Whether a script may branch on values of the batch. `decided` finds floating-point numbers that decide. A number that is
    only written down or divided by decides nothing; of types that are not `tried`, all do. A check for finite numbers is not
    tried: what a script does about it may last."""
    reads = [read for read, marks in whole.by_script.items() if read[1] in (bool, int) and marks != {FINITE}]
    if whole.branches.found or len(reads) > MOST or any(kind not in tried for _, kind in reads):
        return True
    calls = _without_reads(whole.branches.made)
    for read in reads:
        looks = [_with_others(read, again.run, other) for other in _OTHERS[read[1]]]
        known = [look for look in looks if look is not None]
        if len(known) < len(looks) or any(_sites(each.branches.made) != _sites(whole.branches.made) for each, _ in known):
            return True
        if any(each.moved != whole.moved for each, _ in known):  # by Python alone
            return True
        alike = [_without_reads(each.branches.made) == calls and again.same(again.made, made) for each, made in known]
        if not all(alike) if read[1] is bool else alike[0] and not all(alike):
            return True
    return False


def _sites(made: CallsMade) -> set[Site]:
    return {site for site, _ in made}


def _without_reads(made: CallsMade) -> set[Made]:
    """Return calls without what they return."""
    return {(site, tuple(each for each in numbers if type(each) is not tuple)) for site, numbers in made}


def tried_on(device: torch.device, model: torch.nn.Module) -> Collection[type]:
    """Return the types of what may be replaced on this device. An index that is out of bounds ends a CUDA process; what runs
    depending on values would have to run on all ranks of a sharded model."""
    return () if is_sharded(model) else (bool, int) if device.type == "cpu" else (bool,)
