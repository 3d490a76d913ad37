"""Reads small tensors of a device some steps later, without synchronizing with it.

Not covered: devices without events, which cannot tell whether a copy has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from memfit.hardware.clock import PENDING, Clock

T = TypeVar("T")


class AsyncReads(Generic[T]):
    """Holds the latest tensors to read, each with what it is about, while they are copied to the host."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._pending: deque[tuple[T, torch.Tensor, Any]] = deque(maxlen=PENDING)

    def add(self, about: T, tensor: torch.Tensor) -> None:
        """Start to copy a tensor to the host."""
        # The copy goes to pinned memory, where the host may read stale values until the event is reached.
        self._pending.append((about, tensor.to("cpu", non_blocking=True), self._clock.now()))

    def arrived(self) -> Iterator[tuple[T, torch.Tensor]]:
        """Yield the tensors, on the host, that have arrived since the last call."""
        while self._pending and self._clock.reached(self._pending[0][2]):
            yield self._pending.popleft()[:2]

    def wait(self) -> None:
        """Wait until all of them have arrived."""
        for _, _, moment in self._pending:
            if moment is not None:
                moment.synchronize()
