"""Loads FILE.py:function, a function that returns (model, optimizer, loader[, loss_fn]), and trains with the result.

Not covered: functions that take arguments.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import memfit
from memfit._errors import UsageError
from memfit.training.run import Run

RETURNS = "(model, optimizer, loader) or (model, optimizer, loader, loss_fn)"


@dataclass(frozen=True)
class UserTraining:
    """Holds what the function returned."""

    model: Any
    """The module to train."""
    optimizer: Any
    """Its optimizer."""
    loader: Any
    """The loader of its batches."""
    loss_fn: Callable[[Any, Any], Any]
    """Maps (model, batch) to a scalar loss."""

    def wrapped(self, target_batch: int | None, budget: int | float | str | None) -> Run:
        """Call `memfit.wrap` on it."""
        return memfit.wrap(
            self.model, self.optimizer, self.loader, loss_fn=self.loss_fn, target_batch=target_batch, budget=budget
        )


def split_target(target: str) -> tuple[Path, str | None]:
    """Split "FILE.py:function" into (file, function); the function is None if only a file is named."""
    file, colon, name = target.rpartition(":")
    if colon and name.isidentifier() and not Path(target).exists():
        return Path(file), name
    return Path(target), None


def check_file(file: Path) -> None:
    """Check that the file exists and is a file. Raises UsageError otherwise."""
    if not file.exists():
        raise UsageError(f"running {str(file)!r}", found="there is no such file", next_move="check its name and folder")
    if not file.is_file():
        raise UsageError(f"running {str(file)!r}", found="it is not a file", next_move="name a Python file")


def made_by(file: Path, name: str) -> UserTraining:
    """Call the function and return its training. Raises UsageError; exceptions in the user's code pass through."""
    check_file(file)
    module = _imported(file)
    function = getattr(module, name, None)
    asked = f"{file.name}:{name}"
    if not callable(function):
        own = (n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__)
        found = "there is no such function in it" if function is None else f"it is of type {type(function).__name__}"
        raise UsageError(asked, found=found, next_move=f"name one of its functions: {', '.join(own) or '(it has none)'}")
    made = function()
    if not isinstance(made, (tuple, list)) or len(made) not in (3, 4):
        is_tuple = isinstance(made, (tuple, list))
        what = f"a {type(made).__name__} of {len(made)}" if is_tuple else f"a value of type {type(made).__name__}"
        raise UsageError(asked, found=f"it returned {what}", next_move=f"let it return {RETURNS}")
    model, optimizer, loader, *rest = made
    loss_fn = next(iter(rest), None)
    return UserTraining(model, optimizer, loader, partial(_own_loss, asked) if loss_fn is None else loss_fn)


def train_once(run: Run, asked: str) -> None:
    """Run one training step. Raises UsageError if there is no batch."""
    batch = next(iter(run.loader), None)
    if batch is None:
        raise UsageError(asked, found="its loader yields nothing", next_move="return one that yields batches")
    run.step(batch)


def _own_loss(asked: str, model: Any, batch: Any) -> Any:
    """The loss that the model itself returns, as Hugging Face models do. Raises UsageError if it returns none."""
    output = model(**batch) if isinstance(batch, Mapping) else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise UsageError(
            asked,
            found="it returned no loss_fn, and the model does not return its loss when called with a batch as keywords",
            next_move="return (model, optimizer, loader, loss_fn), where loss_fn(model, batch) is the loss to minimise",
        )
    return loss


def _imported(file: Path) -> ModuleType:
    """Import the file as a module, with its folder on the path; it stays imported, so that workers find its classes."""
    sys.path.insert(0, str(file.resolve().parent))
    name = file.stem if file.stem not in sys.modules else f"memfit_given_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, str(file))
    if spec is None or spec.loader is None:
        raise UsageError(f"importing {str(file)!r}", found="it is not a Python file", next_move="name a file ending in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
