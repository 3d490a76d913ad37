"""Which GPUs take the same kernels: noted while a step is traced for one, so that others need no trace of their own.

Kernels are chosen by compute capability in steps (`attention.py`); what lies between two steps is the same to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from memfit.kernels.target import Target

STEPS = ((0, 0), (5, 0), (7, 0), (8, 0), (8, 6), (8, 7), (8, 9), (8, 10), (12, 0), (12, 2))
"""Compute capabilities from which on another choice may be made."""

_SEEN: ContextVar[set[tuple[int, int]] | None] = ContextVar("memfit_alike", default=None)


def step_of(capability: tuple[int, int]) -> tuple[int, int]:
    """The capability that stands for this one: the last of `STEPS` up to it."""
    return max(step for step in STEPS if step <= capability)


@contextmanager
def noting_alike() -> Iterator[set[tuple[int, int]]]:
    """Inside, traces are watched: the set holds those of `STEPS` that would have taken the same kernels so far."""
    left = set(STEPS)
    token = _SEEN.set(left)
    try:
        yield left
    finally:
        _SEEN.reset(token)


def note(choice: Callable[[Target], str], kernel: str) -> None:
    """A kernel was chosen; `choice` says which it would have been for another target."""
    left = _SEEN.get()
    if left is not None:
        left -= {step for step in left if choice(Target(step)) != kernel}
