"""A plan that runs, what it rests on, and how far measuring while training has come with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.planning.plan import Plan
from memfit.profiling.profile import Profile
from memfit.training.tune import Tuner


@dataclass
class Planned:
    """What is in force while batches of one kind run; `Core.activate` lets it be."""

    plan: Plan
    """The plan; another one once measuring while training found a faster size, or memory ran out."""
    profile: Profile | None
    """What it rests on; None for a plan that was made elsewhere."""
    largest: int = field(init=False)
    """The most samples per micro-batch: the plan's, or less since memory ran out."""
    tuner: Tuner | None = field(init=False, default=None)
    """What tries other sizes of micro-batch; None once that is over."""

    def __post_init__(self) -> None:
        self.largest = self.plan.micro_batch
