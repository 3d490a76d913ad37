"""A run's figures for the trackers of accelerate: memory, plan, speed and what happened, as the main process knows them.

Trackers that keep the steps of each figure apart (TensorBoard) are given them while training goes on. Others get them with what
the script itself logs: Weights & Biases counts one step for everything, and leaves out what comes with an earlier one. Not
covered: what devices of other machines are doing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from memfit import Run

STEPS_APART = ("tensorboard", "mlflow", "aim", "comet_ml", "clearml")
"""Trackers in which every figure has steps of its own."""
TAKE_TEXT = ("tensorboard", "comet_ml", "wandb")
"""Trackers that take strings."""
EVERY = 10
"""Optimizer steps from one log to the next, after as many that are all logged."""
COUNTED = ("replan", "out of memory", "not equal")
"""Events whose number is told."""


class Follower:
    """Logs what a run does, in `trackers`, after its optimizer steps; `processes` of the training run on this machine."""

    def __init__(self, run: Run, trackers: Sequence[Any], processes: int) -> None:
        self._run, self._trackers, self._processes = run, trackers, processes
        self._told: dict[str, tuple[str | None, int]] = {}
        self._steps = self._logged = 0
        self._hook = run.optimizer.register_step_post_hook(self._stepped)

    def log(self) -> None:
        """Log the latest figures, if they are not logged yet."""
        if self._logged == self._steps:
            return
        self._logged = self._steps
        for tracker in self._trackers:
            if tracker.name in STEPS_APART:
                figures = self.figures(tracker)
                tracker.log(figures, step=figures["memfit/step"])

    def figures(self, tracker: Any) -> dict[str, Any]:
        """What is known now; as text, what this tracker was not told yet."""
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
        """Log what was not logged yet, and nothing from now on."""
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
    """Percent of the last moments in which the device of each process on this machine computed, as NVML counts it."""
    if not torch.cuda.is_available():
        return {}
    try:
        return {f"utilisation_rank{i}": torch.cuda.utilization(i) for i in range(min(processes, torch.cuda.device_count()))}
    except Exception:  # the package is optional, and its errors are its own; slices of a device have no such figure
        return {}


def processes_here(processes: int) -> int:
    """How many of the processes run on this machine."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() else processes
