"""Overrides from the command line for the next `wrap` in this process: other numbers, and whether to stop at the plan.

A context variable holds them, so that nothing remains after the command.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from memfit._errors import UsageError
from memfit.hardware.budget import Budget, budget_for, probe
from memfit.hardware.catalogue import Card
from memfit.hardware.exhausted import free_unused


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


def allowed_for(budget: int | float | str | None, device: torch.device, asked: Asked | None) -> tuple[Budget, Card | None]:
    """Return the budget, and the card if the command line plans for a GPU that is not here. The script's own budget is only for
    the device that is here."""
    if asked is None or asked.card is None:
        if device.type != "cpu":
            free_unused(device)  # a wrapped model and its run refer to each other, and the cycle keeps memory alive
        return probe(budget=budget, device=device), None
    return budget_for(asked.card.as_device(), asked.budget), asked.card


def check_not_asked(asked: Asked | None) -> None:
    """Raise UsageError if memfit is disabled but only the plan was asked for: the script would train to its end."""
    if asked is not None and asked.stop:
        raise UsageError(
            "the plan of this script",
            found="memfit is switched off in it (enabled=False, or MEMFIT=off in the environment)",
            next_move="switch it on to see its plan",
        )
