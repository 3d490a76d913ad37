"""Describes what is planned: one kind of work on one kind of batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.engine.weighting import Weighting
from memfit.engine.work import Work
from memfit.planning.search import Demand
from memfit.tracing.trace import MakeWork

LOSS_BOUND = 3
"""Copies of a model's output that an unseen loss is assumed to need at once: log-probabilities, their gradient, a temporary."""


@dataclass(frozen=True)
class Task:
    """Work to profile, time and plan."""

    make_work: Callable[[str], MakeWork]
    """Maps a precision to a factory of work on fake tensors (twins), for tracing."""
    real_work: Callable[[str], Work]
    """Maps a precision to the real work, for timing."""
    weighting: Weighting
    """How its micro-batches are weighted."""
    available: int
    """Number of samples available for tracing."""
    demand: Demand
    """How much of it to plan."""
    compiled: bool = False
    """Whether the model is compiled. Then it is measured instead of traced."""
