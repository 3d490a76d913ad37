"""Logs a run's metrics to accelerate's trackers: memory, plan, speed and events, as known on the main process.

Trackers with separate steps per metric (TensorBoard) receive them during training. Others receive them with what the script
logs: Weights & Biases has one step counter for everything, and drops values of earlier steps. Not covered: the devices of
other machines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from memfit import Run

STEPS_APART = ("tensorboard", "mlflow", "aim", "comet_ml", "clearml")
"""Trackers in which every metric has its own steps."""
TAKE_TEXT = ("tensorboard", "comet_ml", "wandb")
"""Trackers that accept strings."""
EVERY = 10
"""Logging interval in optimizer steps. The first `EVERY` steps are all logged."""
COUNTED = ("replan", "out of memory", "not equal")
"""Events that are logged as counts."""


class Follower:
    """Logs a run's metrics to `trackers` after its optimizer steps. `processes` ranks of the training run on this machine."""

    def __init__(self, run: Run, trackers: Sequence[Any], processes: int) -> None:
        self._run, self._trackers, self._processes = run, trackers, processes
        self._told: dict[str, tuple[str | None, int]] = {}
        self._steps = self._logged = 0
        self._hook = run.optimizer.register_step_post_hook(self._stepped)

    def log(self) -> None:
        """Log the latest metrics, unless they are logged already."""
        if self._logged == self._steps:
            return
        self._logged = self._steps
        for tracker in self._trackers:
            if tracker.name in STEPS_APART:
                figures = self.figures(tracker)
                tracker.log(figures, step=figures["memfit/step"])

    def figures(self, tracker: Any) -> dict[str, Any]:
        """Return the current metrics, plus text that this tracker has not received yet."""
        run, plan = self._run, self._run.plan
        found: dict[str, Any] = {name: value for name, value in run.stats().items() if value is not None}
        if plan is not None:
            found |= {"budget": plan.limit, "checkpointed_blocks": len(plan.checkpoint)}
        happened = [event.kind for event in run.events]
        found |= {kind.replace(" ", "_"): happened.count(kind) for kind in COUNTED}
        found |= utilisation(self._processes)
        if tracker.name in TAKE_TEXT:
            found |= self._news(tracker.name)
        return {f"memfit/{name}": value for name, value in found.items()}

    def end(self) -> None:
        """Log what is not logged yet, and stop."""
        self.log()
        self._hook.remove()

    def _stepped(self, *_: object) -> None:
        self._steps += 1
        if self._steps <= EVERY or self._steps % EVERY == 0:
            self.log()

    def _news(self, tracker: str) -> dict[str, str]:
        plan, events = self._run.plan, self._run.events
        told, number = self._told.get(tracker, (None, 0))
        now = None if plan is None else plan.summary()
        self._told[tracker] = now, len(events)
        found = {} if now is None or now == told else {"plan": now}
        if len(events) > number:
            found["events"] = "\n\n".join(f"step {e.step}: {e.kind}: {e.message}" for e in events[number:])
        return found


def utilisation(processes: int) -> dict[str, int]:
    """Return the GPU utilization in percent of each rank on this machine over the last sample period, as NVML reports it."""
    if not torch.cuda.is_available():
        return {}
    try:
        return {f"utilisation_rank{i}": torch.cuda.utilization(i) for i in range(min(processes, torch.cuda.device_count()))}
    except Exception:  # the package is optional and has its own errors; MIG slices have no utilization
        return {}


def processes_here(processes: int) -> int:
    """Return how many of the ranks run on this machine."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() else processes
