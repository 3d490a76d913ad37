"""Records which GPUs run the same kernels while a step is traced for one of them, so that the others need no trace.

The choice of kernel changes at certain compute capabilities (`attention.py`). GPUs between two of these run the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from memfit.kernels.target import Target

STEPS = ((0, 0), (5, 0), (7, 0), (8, 0), (8, 6), (8, 7), (8, 9), (8, 10), (12, 0), (12, 2))
"""Compute capabilities at which the choice of kernel may change."""

_SEEN: ContextVar[set[tuple[int, int]] | None] = ContextVar("memfit_alike", default=None)


def step_of(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the capability that represents this one: the last of `STEPS` up to it."""
    return max(step for step in STEPS if step <= capability)


@contextmanager
def noting_alike() -> Iterator[set[tuple[int, int]]]:
    """Watch the traces made inside: the set holds those of `STEPS` that would have run the same kernels so far."""
    left = set(STEPS)
    token = _SEEN.set(left)
    try:
        yield left
    finally:
        _SEEN.reset(token)


def note(choice: Callable[[Target], str], kernel: str) -> None:
    """Record the chosen kernel; `choice` returns the one for another target."""
    left = _SEEN.get()
    if left is not None:
        left -= {step for step in left if choice(Target(step)) != kernel}
