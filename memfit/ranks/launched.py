"""A collective from its launch until gloo's threads have let go of its tensors, too.

Its own `wait` returns before they have. A thread needs the interpreter to let go of a tensor made in Python; where Python has
come to its end by then, it takes the process down with "terminate called without an active exception" (pytorch/pytorch#190489,
in torch 2.13). So it is given tensors that nobody else holds, and is over once only this holds them. Not covered: collectives
that fail, those of libraries and of the script's own, and those on devices, whose threads keep tensors for longer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from memfit.hardware.exhausted import patiently

LONGEST = 5.0
"""Seconds after which a thread is no longer waited for: it has a few instructions left, on a machine that may be loaded."""


class Launched:
    """`collective`, under way on the memory of these tensors; it is given others that share it, and has to return its work.
    Where memory runs out before it is launched, the other processes wait in theirs: it is tried again."""

    def __init__(self, collective: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        device = tensors[0].device if tensors else torch.device("cpu")
        self._work = patiently(lambda: collective(self._tensors), device)

    def is_completed(self) -> bool:
        """Whether it has come to its end, well or not."""
        return self._work is None or self._work.is_completed()

    def wait(self, patience: timedelta | None = None) -> None:
        """Return once it is done. Raises RuntimeError where it failed, or takes longer than `patience`."""
        work, self._work = self._work, None
        if work is not None:
            work.wait() if patience is None else work.wait(patience)

    def settle(self) -> None:
        """Return once nobody holds its tensors any more, after `wait`."""
        if self._tensors and self._tensors[0].device.type != "cpu":
            return
        (alone,) = _counts([torch.empty(0)])
        until = 0.0
        while any(count > alone for count in _counts(self._tensors)):
            until = until or time.monotonic() + LONGEST
            if time.monotonic() > until:
                return
            time.sleep(0)  # lets go of the interpreter, and of the core


def _counts(tensors: list[torch.Tensor]) -> list[int]:
    return [_count(tensor) for tensor in tensors]


def _count(tensor: torch.Tensor) -> int:
    """How many hold it: in Python; and in torch itself, of which Python is one. A thread lets go of it there first, and then
    (from torch 2.13) in Python, for which it needs the interpreter."""
    inside = getattr(tensor, "_use_count", None)  # a private method, that says what no public one does
    return sys.getrefcount(tensor) + (0 if inside is None else inside())

