"""What is planned: one kind of work on one kind of batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.engine.accumulate import Weighting, Work
from memfit.planning.search import Demand
from memfit.profiling.trace import MakeWork

LOSS_BOUND = 3
"""Copies of a model's output that an unseen loss is taken to need at once: log-probabilities, their gradient, a temporary."""


@dataclass(frozen=True)
class Task:
    """Work to profile, time and plan."""

    make_work: Callable[[str], MakeWork]
    """From a precision to what makes twin work for tracing."""
    real_work: Callable[[str], Work]
    """From a precision to the real work, for timing."""
    weighting: Weighting
    """How its micro-batches are weighted."""
    available: int
    """Samples that there are to trace with."""
    demand: Demand
    """How much of it."""
    compiled: bool = False
    """Whether the model is compiled: then it is measured, not traced."""
