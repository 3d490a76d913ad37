"""Compares which of the script's lines call torch in each micro-batch, and with which numbers.

A forward or a loss may read values of the batch and branch on them: `if (out.argmax(1) == y).any(): loss = loss * 0.9`. Whole
and parts of a proof may take the same branch where micro-batches of a later batch do not. So if a proof sees that values are
read that may decide, all micro-batches of a batch have to make the same calls with the same numbers. Exempt are calls in which
whole and parts differed with equal results: a mask that leaves nothing, a count that divides.

Not covered: what a whole batch decides otherwise than all of its micro-batches; how often a line runs; branches of hooks, of
backward functions, of installed packages and of compiled code; those that only select tensors, modules, or integers for sizes.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.batches import weights
from memfit.batches.weights import known_loss
from memfit.engine import known_means
from memfit.engine.call_context import is_faking
from memfit.engine.known_means import answering
from memfit.engine.user_line import is_of_script

COMPUTING = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv idiv divide truediv rtruediv itruediv pow rpow "
    "ipow true_divide floordiv mod remainder tensor as_tensor clamp clamp_min clamp_max clip masked_fill where fill full_like "
    "lerp threshold hardtanh eq ne lt le gt ge maximum minimum".split()
)
"""Functions whose integers are numbers to compute with. Those of others are mostly sizes and dimensions."""
LISTED = 64
"""Numbers in a list that are looked at."""
_PASSING = tuple(map(str, (Path(torch.__file__).parent, known_means.__file__, weights.__file__)))
"""Files whose functions call torch for the script."""
_WORDS = (float, str, bool, type(None))

Site = tuple[str, int, int]
"""A place in the script's code that calls torch: the file, the first line of the function, the offset of the instruction."""
Made = tuple[Site, tuple[Any, ...]]
"""A call: where it is made, of which function, and with which numbers. A bool that it returns is among them, as a tuple of one.
Calls by packages have only a place."""
CallsMade = Mapping[Made, CodeType]
"""The calls of a run, with the code that makes each."""


@dataclass(frozen=True)
class MovedPlace:
    """A place that a run moves."""

    key: tuple[Any, ...]


Act = Made | MovedPlace
"""What only some micro-batches do."""


class Branches(TorchFunctionMode):
    """Records the script's calls of torch in `made`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Made, CodeType] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if torch.compiler.is_compiling():  # a function of the script's
            return result
        name, computes = _about(func)
        if name == "get" or (answering() and known_loss(getattr(func, "__wrapped__", func)) is None):
            return result
        frame, is_direct = _of_script(sys._getframe(1))
        if frame is not None:
            code = frame.f_code
            site = code.co_filename, code.co_firstlineno, frame.f_lasti
            self.made[site, (name, *_numbers(computes, args, kwargs, result)) if is_direct else ()] = code
        return result


@lru_cache(1 << 12)
def _about(func: Any) -> tuple[str, bool]:
    """Return the name of a function without underscores, and whether its integers are numbers to compute with."""
    name = func.__name__.strip("_")
    return name, name in COMPUTING


def _of_script(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Return the innermost frame of the script, and whether it calls torch itself and not through a package."""
    is_direct = True
    while frame is not None:
        code = frame.f_code
        if is_of_script(code.co_filename):
            return frame, is_direct
        is_direct = is_direct and (_passes(code.co_filename) or code.co_name == "__torch_function__")
        frame = frame.f_back
    return None, False


def frame_of_script(frame: FrameType | None) -> FrameType | None:
    """Return the frame that calls torch, if it is the script's and not that of a package."""
    frame, is_direct = _of_script(frame)
    return frame if is_direct else None


@cache
def _passes(file: str) -> bool:
    """Whether functions of this file call torch for the script."""
    return file.startswith(_PASSING)


def _numbers(computes: bool, args: tuple[Any, ...], kwargs: Any, result: Any) -> tuple[Any, ...]:
    found = [each for each in args if type(each) is float or (computes and type(each) in (int, bool))]
    for listed in args if computes else ():
        if type(listed) is list:
            found += [each for each in listed[:LISTED] if type(each) in (float, int, bool)]
    if kwargs:
        found += [each for each in kwargs.values() if type(each) in _WORDS or (computes and type(each) is int)]
    if type(result) is bool or (type(result) is int and args and getattr(args[0], "dtype", None) is torch.bool):
        found.append((result,))
    return tuple("nan" if each != each else each for each in found) if found else ()


@dataclass(frozen=True)
class Branching:
    """What a proof shows of a script that reads values of the batch."""

    free: frozenset[Made] = frozenset()
    """Calls that not all of whole and parts made, with equal results."""
    varied: frozenset[Site] = frozenset()
    """Places where they made such calls with several numbers."""

    def joined(self, other: Branching | None) -> Branching:
        """Return what both show."""
        return self if other is None else Branching(self.free | other.free, self.varied | other.varied)

    def allows(self, made: Made) -> bool:
        """Whether micro-batches may differ in a call."""
        return made in self.free or made[0] in self.varied

    def differing(self, one: CallsMade, other: CallsMade) -> dict[Made, CodeType]:
        """Return the calls that only one of two micro-batches makes, and that may change what they give."""
        return {
            each: of[each] for of, not_of in ((one, other), (other, one)) for each in of
            if each not in not_of and not self.allows(each)
        }  # fmt: skip


def branching_of(looks: Sequence[CallsMade]) -> Branching:
    """Return what the calls of the whole and the parts of a proof show of branches."""
    seen = [look.keys() for look in looks]
    free = frozenset[Made]().union(*seen) - frozenset(seen[0]).intersection(*seen)
    numbers = Counter(site for site, _ in free)
    return Branching(free, frozenset(site for site, count in numbers.items() if count > 1))


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
        ((file, first, offset), _), code = min(self.differing.items(), key=lambda each: each[0][0])
        before = [line for start, line in dis.findlinestarts(code) if start <= offset and line is not None]
        return f"{Path(file).name}:{before[-1] if before else first}"
