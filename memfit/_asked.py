"""Overrides from the command line for the next `wrap` in this process: other numbers, and whether to stop at the plan.

A context variable holds them, so that nothing remains after the command.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from memfit.hardware.catalogue import Card


def _ignore(run: Any) -> None:
    pass


@dataclass(frozen=True)
class Asked:
    """Overrides the arguments of `wrap`, and says whether to stop at the plan."""

    target_batch: int | None = None
    """Replaces the script's target_batch, if given."""
    budget: int | float | str | None = None
    """Replaces the script's budget, if given."""
    card: Card | None = None
    """A GPU that is not in this machine. The plan is for it instead of the model's device."""
    stop: bool = True
    """Whether to raise PlanReady as soon as a plan takes effect."""
    on_wrap: Callable[[Any], None] = _ignore
    """Called with each Run that `wrap` creates, before it plans."""


class PlanReady(BaseException):
    """Signals that a plan exists. It is a BaseException, so that no `except Exception` in the script catches it."""

    def __init__(self, run: Any) -> None:
        super().__init__("a plan is ready")
        self.run = run


ASKED: ContextVar[Asked | None] = ContextVar("memfit_asked", default=None)
"""The current overrides, or None."""
