"""Wraps several models or optimizers in one call. Each model is wrapped on its own, with the optimizer that trains it.

Not covered: step mode, and existing plans, because a plan is for one model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from memfit._errors import UsageError
from memfit.runtime.allow_inexact import is_known
from memfit.runtime.events import Event
from memfit.training.run import Run

STEP_MODE = ("loss_fn", "before_step", "sample", "weight", "plan")
"""Arguments that apply to a single model only."""


@dataclass(frozen=True)
class SiblingRuns:
    """The other runs and optimizers of the same script."""

    runs: tuple[Run, ...] = ()
    """Runs of other models, wrapped by the same call."""
    optimizers: tuple[Any, ...] = ()
    """Other optimizers of this model."""


ALONE = SiblingRuns()
BESIDE: ContextVar[SiblingRuns] = ContextVar("BESIDE", default=ALONE)


class Runs:
    """Holds the runs of several models that train together. Unpacks into (models, optimizers, loader), as they were given.

    Attributes: `runs` (a Run for each model, in order; the Run of the first trained model has the loader).
    """

    def __init__(self, models: Any, optimizers: Any, runs: Sequence[Run], loader: Any) -> None:
        self.models, self.optimizers, self.runs, self.loader = models, optimizers, tuple(runs), loader

    def __iter__(self) -> Iterator[Any]:
        return iter((self.models, self.optimizers, self.loader))

    def __repr__(self) -> str:
        return f"memfit.Runs({', '.join(map(repr, self.runs))})"

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of all runs so far, ordered by step."""
        return tuple(sorted((event for run in self.runs for event in run.events), key=lambda event: event.step))

    def report(self) -> Any:
        """Return the report of the planned model with the highest predicted peak. `runs[i].report()` returns the others."""
        planned = [run for run in self.runs if run.plan is not None]
        return max(planned or self.runs, key=lambda run: 0 if run.plan is None else run.plan.predicted.peak).report()

    def undo(self) -> None:
        """Restore the models, optimizers and loaders to their state before `wrap`."""
        for run in reversed(self.runs):
            run.undo()


def wrap_several(
    wrap: Callable[..., Run], frozen: Callable[..., Run], models: Any, optimizers: Any, loader: Any, settings: dict[str, Any]
) -> Runs:
    """Call `wrap` for each trained model and `frozen` for the others. Raises UsageError and leaves everything unchanged."""
    each = list(models) if isinstance(models, (list, tuple)) else [models]
    stepped = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    _check(each, stepped, settings)
    trained = [model for model in each if any(p.requires_grad for p in model.parameters())]
    runs: dict[int, Run] = {}
    try:
        for model in (*trained, *(m for m in each if m not in trained)):
            own = [optimizer for optimizer in stepped if _shared(optimizer, model)]
            mine = _of_one(settings, model, first=not runs)
            before = BESIDE.set(SiblingRuns(tuple(runs.values()), tuple(own[1:])))
            try:
                if model in trained:
                    runs[id(model)] = wrap(model, (own or stepped)[0], None if runs else loader, **mine)
                else:
                    runs[id(model)] = frozen(model, stepped[0], mine["budget"])
            finally:
                BESIDE.reset(before)
    except BaseException:
        for run in runs.values():
            run.undo()
        raise
    return Runs(models, optimizers, [runs[id(model)] for model in each], runs[id(trained[0])].loader)


def _check(models: list[Any], optimizers: list[Any], settings: dict[str, Any]) -> None:
    asked = f"wrapping {len(models)} models with {len(optimizers)} optimizers"
    wrong = next((m for m in models if not isinstance(m, nn.Module)), None)
    if not models or wrong is not None:
        found = "there is no model" if not models else f"one of the models is of type {type(wrong).__name__}"
        raise UsageError(asked, found=found, next_move="pass lists of torch.nn.Module and of their optimizers, then the loader")
    if len({id(model) for model in models}) < len(models):
        raise UsageError(asked, found="a model is listed twice", next_move="list every model once")
    given = [name for name in STEP_MODE if settings[name] is not None]
    if given:
        raise UsageError(
            asked,
            found=f"{given[0]}= is about one model",
            next_move="wrap the models one by one, or omit it: the script's own loop may use all of them",
        )
    if not any(p.requires_grad for model in models for p in model.parameters()):
        raise UsageError(asked, found="none of their parameters requires a gradient", next_move="unfreeze what is to train")
    if len(models) > 1 or len(optimizers) > 1:
        idle = next((o for o in optimizers if not any(_shared(o, model) for model in models)), None)
        if idle is not None:
            raise UsageError(
                asked,
                found=f"one optimizer ({type(idle).__name__}) holds no parameter of any of the models",
                next_move="build it from their parameters(), after moving or converting them",
            )
    if len(optimizers) > 1 and settings["shard"] not in ("auto", "off"):
        raise UsageError(
            f"shard={settings['shard']!r} with {len(optimizers)} optimizers",
            found="only one optimizer's state can be sharded",
            next_move="pass one optimizer with several parameter groups, or shard='off'",
        )


def _of_one(settings: dict[str, Any], model: nn.Module, *, first: bool) -> dict[str, Any]:
    """Return the settings for this model. The first model gets `target_batch`, because it has the loader."""
    mine = {**settings, "target_batch": settings["target_batch"] if first else None}
    mine["methods"] = [name for name in settings["methods"] if hasattr(model, name)]
    if not first:
        mine["script_accumulation"] = 1
    names = settings["allow_inexact"]
    if isinstance(names, (list, tuple)):
        mine["allow_inexact"] = [name for name in names if is_known(name, model)]
    blocks = settings["checkpoint"]
    if isinstance(blocks, (list, tuple)):
        mine["checkpoint"] = [name for name in blocks if name in dict(model.named_modules())] or "off"
    return mine


def _shared(optimizer: Any, model: nn.Module) -> int:
    """Return how many of the model's parameters the optimizer trains."""
    groups = getattr(optimizer, "param_groups", ())
    held = {id(p) for group in groups for p in group["params"]}
    return sum(id(p) in held for p in model.parameters())
