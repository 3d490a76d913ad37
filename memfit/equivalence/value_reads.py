"""Finds out whether a script reads values of the batch as lists, as arrays, or as the size of what a mask leaves.

Of these, only sizes can be tried with other values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch._tensor
import torch.overrides
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.batches.tree import flat, is_column, tensors
from memfit.engine.branches import Branches, frame_of_script
from memfit.engine.known_means import answering
from memfit.engine.user_line import is_of_script

READING = frozenset("tolist numpy array equal allclose repr str format dlpack reduce_ex".split())
"""Functions that give values of a tensor to Python."""
PICKING = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive bincount repeat_interleave one_hot to_sparse".split()
)
"""Functions that return tensors whose shape depends on values."""
SIZING = frozenset("len size numel nelement nnz iter unbind".split())
"""Functions that give the shape of a tensor to Python."""
_METHODS = frozenset(map(str, (torch._tensor.__file__, torch.overrides.__file__)))
"""Files of torch between a script and a method of a tensor that it calls."""


class ValueReads(Branches):
    """Records the script's calls of torch in `made`, and in `found` whether it reads values of the batch. `depends` tells
    whether a tensor depends on the batch; `sized` returns what the script's frame is told of a size that depends on values."""

    def __init__(self, depends: Callable[[torch.Tensor], bool], sized: Callable[[FrameType, int], int]) -> None:
        super().__init__()
        self.found = False
        self._depends, self._sized = depends, sized
        self._picked = WeakTensorKeyDictionary()
        """Tensors whose shapes depend on values."""

    def given(self, batch: Any) -> None:
        """Note a batch. Numbers and texts in its lists may be read at any time."""
        self.found = self.found or any(map(is_column, flat(batch)))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if answering() or frame_of_script(sys._getframe(1)) is None:
            return result
        name, given = func.__name__.strip("_"), tensors((args, kwargs or {}))
        is_picked = any(each in self._picked for each in given)
        if name in READING:
            self.found = self.found or any(map(self._depends, given))
        elif is_picked and (name in SIZING or getattr(getattr(func, "__self__", None), "__name__", "") == "shape"):
            return self._size(asking_frame(sys._getframe(1)), result)
        elif is_picked or (_picks(name, args) and any(map(self._depends, given))):
            for each in tensors(result):
                self._picked[each] = True
        return result

    def _size(self, frame: FrameType | None, size: Any) -> Any:
        if frame is None:  # torch's functions ask for shapes, too
            return size
        self.found = True
        if type(size) is torch.Size and size:
            return torch.Size((self._sized(frame, size[0]), *size[1:]))
        return self._sized(frame, size) if type(size) is int else size


def asking_frame(frame: FrameType | None) -> FrameType | None:
    """Return the script's frame that calls a method of a tensor, or None if it calls a function of torch or of a package, which
    does."""
    while frame is not None and (frame.f_code.co_filename in _METHODS or frame.f_code.co_name == "__torch_function__"):
        frame = frame.f_back
    return frame if frame is not None and is_of_script(frame.f_code.co_filename) else None


def _picks(name: str, args: tuple[Any, ...]) -> bool:
    if name == "getitem":
        by = args[1] if type(args[1]) is tuple else (args[1],)
        return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in by)
    return name in PICKING or (name == "where" and len(args) == 1)
