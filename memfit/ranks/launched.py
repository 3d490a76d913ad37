"""Tracks a collective until gloo's threads have released its tensors too.

The collective's own `wait` returns earlier. A thread needs the interpreter to release a tensor made in Python. If Python has
exited by then, the process dies with "terminate called without an active exception" (pytorch/pytorch#190489, in torch 2.13).
So the collective gets tensors that nobody else holds, and it is over once only this object holds them. Not covered:
collectives that fail, those of libraries and of the script, and those on devices, whose threads keep tensors for longer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from memfit.hardware.exhausted import retry_on_oom

LONGEST = 5.0
"""Seconds after which to stop waiting for a thread. It has only a few instructions left, on a machine that may be loaded."""


class Launched:
    """A `collective` in flight on the memory of these tensors. It receives aliases of them and must return its work handle. If
    memory runs out before the launch, it is retried, because the other ranks already wait in theirs."""

    def __init__(self, collective: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        device = tensors[0].device if tensors else torch.device("cpu")
        self._work = retry_on_oom(lambda: collective(self._tensors), device)

    def is_completed(self) -> bool:
        """Whether it has completed, successfully or not."""
        return self._work is None or self._work.is_completed()

    def wait(self, patience: timedelta | None = None) -> None:
        """Wait until it is done. Raises RuntimeError if it failed, or takes longer than `patience`."""
        work, self._work = self._work, None
        if work is not None:
            work.wait() if patience is None else work.wait(patience)

    def settle(self) -> None:
        """After `wait`, wait until nobody else holds its tensors."""
        if self._tensors and self._tensors[0].device.type != "cpu":
            return
        (alone,) = _counts([torch.empty(0)])
        until = 0.0
        while any(count > alone for count in _counts(self._tensors)):
            until = until or time.monotonic() + LONGEST
            if time.monotonic() > until:
                return
            time.sleep(0)  # releases the interpreter lock, and the core


def _counts(tensors: list[torch.Tensor]) -> list[int]:
    return [_count(tensor) for tensor in tensors]


def _count(tensor: torch.Tensor) -> int:
    """Return Python's reference count plus torch's use count, in which Python counts as one. A thread releases the tensor in
    torch first, and then (from torch 2.13) in Python, for which it needs the interpreter."""
    inside = getattr(tensor, "_use_count", None)  # a private method; no public one tells it
    return sys.getrefcount(tensor) + (0 if inside is None else inside())

