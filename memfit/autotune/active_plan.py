"""Holds a plan that runs, the profile behind it, and the state of its tuning during training."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.autotune.tuner import Tuner
from memfit.planning.plan import Plan
from memfit.profiling.profile import Profile


@dataclass
class Planned:
    """What is in force while batches of one kind run, after `PlanInForce.activate`."""

    plan: Plan
    """The plan. It is replaced if tuning finds a faster size, or after an out-of-memory error."""
    profile: Profile | None
    """The profile behind it; None for a plan made elsewhere."""
    largest: int = field(init=False)
    """Maximum samples per micro-batch: the plan's, or fewer after an out-of-memory error."""
    tuner: Tuner | None = field(init=False, default=None)
    """Tries other micro-batch sizes; None once that is over."""

    def __post_init__(self) -> None:
        self.largest = self.plan.micro_batch
