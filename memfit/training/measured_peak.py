"""The peak memory of steps under the plan in force, and whether it stays within the prediction."""

from __future__ import annotations

from memfit.planning.plan import Plan
from memfit.runtime.core import Core

LOOKS = 100
"""Number of steps to wait for one whose measured peak stays within the plan. Sizes are still being measured in the first."""


class MeasuredPeak:
    """Measures from the first whole step of each plan on, so that planning and earlier plans do not count."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._plan: Plan | None = None
        self._from = 0

    def value(self) -> int | None:
        """Return the peak bytes; None before the first whole step, or on platforms that do not tell."""
        core = self._core
        return None if core.in_force.tuning or core.steps <= self._from else core.memory.measured_peak()

    def stepped(self) -> None:
        """Note the end of an optimizer step."""
        core = self._core
        if core.plan is not self._plan:
            core.memory.reset_peak()
            self._plan, self._from = core.plan, core.steps
        core.memory.stepped()

    def settle(self) -> None:
        """Settle the plan in force once a step has stayed within it."""
        core = self._core
        if not core.in_force.settled and core.steps <= LOOKS and core.plan is not None:
            peak = self.value()
            core.in_force.settled = peak is not None and peak <= core.plan.held + core.plan.predicted.upper
