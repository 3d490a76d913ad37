"""Compares which of the script's lines call torch in each micro-batch, and with which numbers.

A forward or a loss may read values of the batch and branch on them: `if (out.argmax(1) == y).any(): loss = loss * 0.9`. Whole
and parts of a proof may take the same branch where micro-batches of a later batch do not. So if a proof sees that values are
read, all micro-batches of a batch have to make the same calls with the same numbers. Exempt are calls in which whole and parts
differed with equal results: a mask that leaves nothing, a count that divides.

Not covered: branches of installed packages and of compiled code; those that only select tensors, or integers for sizes; limits
above 1 of what `len()` returns.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from memfit.batches import weights
from memfit.batches.tree import flat, is_column
from memfit.batches.weights import known_loss
from memfit.engine import known_means
from memfit.engine.call_context import is_faking
from memfit.engine.known_means import answering
from memfit.engine.user_line import is_of_script

READING = frozenset(
    "item bool int float index tolist numpy array contains is_nonzero equal allclose nonzero argwhere masked_select unique "
    "unique_consecutive bincount repeat_interleave".split()
)
"""Functions that give values of a tensor to Python, or return a tensor whose shape depends on them."""
ARITHMETIC = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv idiv divide truediv rtruediv itruediv pow rpow "
    "ipow true_divide floordiv mod remainder".split()
)
"""Functions whose integers are numbers to compute with. Those of others are mostly sizes and dimensions."""
_PASSING = tuple(map(str, (Path(torch.__file__).parent, known_means.__file__, weights.__file__)))
"""Files whose functions call torch for the script."""
_WORDS = (float, str, bool, type(None))


class Site(NamedTuple):
    """A place in the script's code that calls a function of torch."""

    file: str
    function: int
    """The first line of the function."""
    offset: int
    """The offset of the instruction in it."""


Made = tuple[Site, tuple[Any, ...]]
"""A call: where it is made, and with which numbers."""
CallsMade = Mapping[Made, CodeType]
"""The calls of a run, with the code that makes each."""


class Branches(TorchFunctionMode):
    """Records the script's calls of torch in `made`. `reads` tells whether it can read values of the batch: it reads a tensor
    that `depends` on it, or the batch that is `given` has numbers or texts in lists."""

    def __init__(self, depends: Callable[[torch.Tensor], bool] | None = None, given: Any = None) -> None:
        super().__init__()
        self.made: dict[Made, CodeType] = {}
        self.reads = any(map(is_column, flat(given)))
        self._depends = depends

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "__get__" or (answering() and known_loss(func) is None):
            return result
        if (frame := _frame_of_script(sys._getframe(1))) is not None:
            name = func.__name__.strip("_")
            code = frame.f_code
            numbers = _numbers(name, args, kwargs, result)
            self.made[Site(code.co_filename, code.co_firstlineno, frame.f_lasti), numbers] = code
            if self._depends is not None and not self.reads and _reads(name, args):
                self.reads = any(self._depends(each) for each in args if isinstance(each, torch.Tensor))
        return result


def _frame_of_script(frame: FrameType | None) -> FrameType | None:
    """Return the frame that calls torch, if it is the script's and not that of a package."""
    while frame is not None and _passes_on(frame.f_code.co_filename, frame.f_code.co_name):
        frame = frame.f_back
    return frame if frame is not None and is_of_script(frame.f_code.co_filename) else None


@cache
def _passes_on(file: str, name: str) -> bool:
    """Whether a function calls torch for the script, or is of a function mode."""
    return file.startswith(_PASSING) or name == "__torch_function__"


def _reads(name: str, args: tuple[Any, ...]) -> bool:
    if name == "getitem":
        picked = args[1] if type(args[1]) is tuple else (args[1],)
        return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in picked)
    return name in READING or (name == "where" and len(args) == 1)


def _numbers(name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> tuple[Any, ...]:
    computes = name in ARITHMETIC
    found = [each for each in args if type(each) is float or (computes and type(each) in (int, bool))]
    if kwargs:
        found += [each for each in kwargs.values() if type(each) in _WORDS]
    if type(result) is bool or (type(result) is int and args[0].dtype is torch.bool):
        found.append(result)
    return tuple("nan" if each != each else each for each in found)


@dataclass(frozen=True)
class Branching:
    """What a proof shows of a script that reads values of the batch."""

    free: frozenset[Site] = frozenset()
    """Calls that some of whole and parts did not make, or with other numbers, with equal results."""

    def joined(self, other: Branching | None) -> Branching:
        """Return what both show."""
        return self if other is None else Branching(self.free | other.free)

    def allows(self, made: Iterable[Made]) -> bool:
        """Whether micro-batches may differ in these calls."""
        return all(site in self.free for site, _ in made)

    def differing(self, one: CallsMade, other: CallsMade) -> dict[Made, CodeType]:
        """Return the calls that only one of two micro-batches makes, and that may change what they give."""
        return {
            each: of[each] for of, not_of in ((one, other), (other, one)) for each in of
            if each not in not_of and each[0] not in self.free
        }  # fmt: skip


def branching_of(looks: Sequence[Branches]) -> Branching | None:
    """Return what the whole and the parts of a proof show of branches, or None if there are none on values of the batch."""
    if not any(look.reads for look in looks):
        return None
    seen = [look.made.keys() for look in looks]
    varied = frozenset[Made]().union(*seen) - frozenset(seen[0]).intersection(*seen)
    return Branching(frozenset(site for site, _ in varied))


class BranchChecks:
    """Compares the calls that the micro-batches of a pass make, as far as the proof says that they may branch. Attribute:
    `differing`, those that some make and others do not."""

    def __init__(self, known: Branching | None) -> None:
        self.differing: dict[Made, CodeType] = {}
        self._known = known
        self._now: Branches | None = None
        self._first: CallsMade | None = None

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._now = None if self._known is None or is_faking() else Branches()

    def watching(self) -> AbstractContextManager[Any]:
        """The context of what the script computes in a micro-batch. Other modes are entered before."""
        return nullcontext() if self._now is None else self._now

    def end(self) -> None:
        """End a micro-batch: compare its calls with those of the first one."""
        if self._now is None or self._known is None:
            return
        if self._first is None:
            self._first = self._now.made
        else:
            self.differing |= self._known.differing(self._first, self._now.made)
        self._now = None

    def changed(self) -> str | None:
        """Return the line that does not do the same in all micro-batches, or None."""
        if not self.differing:
            return None
        (site, _), code = min(self.differing.items(), key=lambda each: each[0][0])
        before = [line for offset, line in dis.findlinestarts(code) if offset <= site.offset and line is not None]
        return f"{Path(site.file).name}:{before[-1] if before else site.function}"
