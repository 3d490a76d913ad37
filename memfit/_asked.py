"""What the command line asks of the next `wrap` in this process: other numbers, and to stop once there is a plan.

A context variable, so that nothing is left behind when the command is done.
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
    """Overrides for `wrap`, and whether to stop at the plan."""

    target_batch: int | None = None
    """Used instead of the script's target_batch, if given."""
    budget: int | float | str | None = None
    """Used instead of the script's budget, if given."""
    card: Card | None = None
    """A GPU that is not here, to plan for instead of the device the model is on."""
    stop: bool = True
    """Whether to raise PlanReady as soon as a plan is in force."""
    on_wrap: Callable[[Any], None] = _ignore
    """Called with each Run that `wrap` makes, before it plans."""


class PlanReady(BaseException):
    """There is a plan. Not an Exception, so that no `except Exception` of the script's catches it on its way out."""

    def __init__(self, run: Any) -> None:
        super().__init__("a plan is ready")
        self.run = run


ASKED: ContextVar[Asked | None] = ContextVar("memfit_asked", default=None)
"""What is asked now; None: nothing."""
