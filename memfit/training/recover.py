"""Surviving an out-of-memory error that was not foreseen: the effective batch starts again, smaller, and trains once.

Nothing irreversible is inside the retried region: no optimizer step, no hand-over. Gradients gathered so far, the random
state and buffers are put back first. Not covered: failures outside the wrapped forward and backward, and a process that a
kernel kills instead of raising (oneDNN on the CPU may).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from memfit.engine.context import restore_tensors
from memfit.engine.generators import HostDraws, RandomState
from memfit.engine.staged import Staging
from memfit.hardware.exhausted import drop_frames, free_unused, is_out_of_memory, patiently, said_by
from memfit.training.buffers import WrittenBuffers

T = TypeVar("T")

class Again(Exception):
    """Raised by an attempt that wants to be repeated from the start with what it has learnt (a loss scale, true shares)."""


class Recovery:
    """Runs an effective batch, again and smaller if memory runs out.

    Attributes: `drew` (whether any drew from torch's generator on the host, which depends on how it was cut), `host_draws`
    (whether any draws from Python's or NumPy's).
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
        """What drops gathered gradients and puts random state and buffers back to what they are now; that random state."""
        random = RandomState.capture(self._device, host=self.host_draws.kept)
        copies = self._buffers.snapshot()

        def put_back() -> None:
            self._staging.discard()
            random.restore(self._device)
            restore_tensors(copies)

        return put_back, random

    def watched(self) -> Callable[[], bool]:
        """As `remembered`, without copies of buffers other than batch norm's: what puts all else back, and tells whether these
        are as they are now."""
        random, buffers = RandomState.capture(self._device, host=self.host_draws.kept), self._buffers.watched()

        def put_back() -> bool:
            self._staging.discard()
            random.restore(self._device)
            return buffers()

        return put_back

    def run(self, attempt: Callable[[int], T], largest: int) -> T:
        """`attempt(largest)`, with smaller values after each out-of-memory error; at 1 the error is the user's.

        Whatever `attempt` raises, gathered gradients are dropped, and random state and buffers are as they were before.
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
                if isinstance(error, Again):
                    continue
                if largest <= 1 or not is_out_of_memory(error):
                    raise
                text = said_by(error)
                drop_frames(error)
            # Outside the except block: inside, the traceback would keep the failed frames' tensors alive.
            smaller = max(1, largest // 2)
            free_unused(self._device)
            self._on_failure(largest, smaller, text)
            largest = smaller


def surviving(attempt: Callable[[], T], device: torch.device, otherwise: Callable[[str], T]) -> T:
    """`attempt()`, or where memory runs out in it `otherwise(what was said)`, once everything it held is free."""
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
    """`attempt(samples)`, with fewer after each out-of-memory error; with two, the fewest that make a whole and parts of it,
    what is said three times is the caller's error."""

    def fewer(text: str) -> T:
        smaller = max(2, samples // 2)
        on_failure(samples, smaller, text)
        return on_fewer(attempt, smaller, device, on_failure)

    if samples <= 2:
        return patiently(lambda: attempt(samples), device)
    return surviving(lambda: attempt(samples), device, fewer)


def _differ(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether two states of the host's generator differ; no device is asked for anything."""
    return before.numpy().tobytes() != now.numpy().tobytes()
