"""Recovers from an unforeseen out-of-memory error by restarting the effective batch with smaller micro-batches.

The retried region contains nothing irreversible: no optimizer step, no hand-over. Accumulated gradients are dropped; random
state and buffers are restored first. Each batch trains once. Not covered: failures outside the wrapped forward and backward,
and kernels that kill the process instead of raising (oneDNN on the CPU may).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from memfit.engine.buffers import WrittenBuffers
from memfit.engine.call_context import restore_tensors
from memfit.engine.random_state import HostDraws, RandomState
from memfit.engine.staged import Staging
from memfit.hardware.exhausted import drop_frames, free_unused, is_out_of_memory, retry_on_oom, said_by

T = TypeVar("T")

class RestartBatch(Exception):
    """Raised by an attempt to restart from the beginning with what it has learnt (a loss scale, true shares)."""


class Recovery:
    """Runs an effective batch, and again with smaller micro-batches after an out-of-memory error.

    Attributes: `drew` (whether any batch drew from torch's host generator, which depends on how it was cut), `host_draws`
    (whether any draws from Python's or NumPy's generator).
    """

    def __init__(
        self,
        device: torch.device,
        staging: Staging,
        buffers: WrittenBuffers,
        on_failure: Callable[[int, int, str], None],
        host_draws: HostDraws,
    ) -> None:
        self.host_draws = host_draws
        self._device, self._staging, self._buffers, self._on_failure = device, staging, buffers, on_failure
        self.drew = False

    def remembered(self) -> tuple[Callable[[], None], RandomState]:
        """Returns (a function that drops accumulated gradients and restores random state and buffers, the random state)."""
        random = RandomState.capture(self._device, host=self.host_draws.kept)
        copies = self._buffers.snapshot()

        def put_back() -> None:
            self._staging.discard()
            random.restore(self._device)
            restore_tensors(copies)

        return put_back, random

    def watched(self) -> Callable[[], bool]:
        """Like `remembered`, but copies no buffers except batch norm's: the function tells whether the others are unchanged."""
        random, buffers = RandomState.capture(self._device, host=self.host_draws.kept), self._buffers.watched()

        def put_back() -> bool:
            self._staging.discard()
            random.restore(self._device)
            return buffers()

        return put_back

    def run(self, attempt: Callable[[int], T], largest: int) -> T:
        """Calls `attempt(largest)`, with smaller values after each out-of-memory error. At 1 the error is raised.

        If `attempt` raises, accumulated gradients are dropped, and random state and buffers are restored.
        """
        put_back, random = self.remembered()
        while True:
            try:
                done = attempt(largest)
                self.drew = self.drew or _differ(random.cpu, torch.get_rng_state())
                self.host_draws.ran(random.host)
                return done
            except BaseException as error:
                put_back()
                if isinstance(error, RestartBatch):
                    continue
                if largest <= 1 or not is_out_of_memory(error):
                    raise
                text = said_by(error)
                drop_frames(error)
            # Outside the except block, because inside it the traceback keeps the failed frames' tensors alive.
            smaller = max(1, largest // 2)
            free_unused(self._device)
            self._on_failure(largest, smaller, text)
            largest = smaller


def surviving(attempt: Callable[[], T], device: torch.device, otherwise: Callable[[str], T]) -> T:
    """Calls `attempt()`. If it runs out of memory, frees all it held and calls `otherwise(error text)`."""
    try:
        return attempt()
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        text = said_by(error)
        drop_frames(error)
    free_unused(device)
    return otherwise(text)


def on_fewer(
    attempt: Callable[[int], T], samples: int, device: torch.device, on_failure: Callable[[int, int, str], None]
) -> T:
    """Calls `attempt(samples)`, with fewer samples after each out-of-memory error. Two are the minimum for a whole and its
    parts: then the third error is raised."""

    def fewer(text: str) -> T:
        smaller = max(2, samples // 2)
        on_failure(samples, smaller, text)
        return on_fewer(attempt, smaller, device, on_failure)

    if samples <= 2:
        return retry_on_oom(lambda: attempt(samples), device)
    return surviving(lambda: attempt(samples), device, fewer)


def _differ(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether two states of the host generator differ. Does not synchronize with a device."""
    return before.numpy().tobytes() != now.numpy().tobytes()
