"""The scope of planning: what code running inside it changes in the user's objects is undone at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from memfit.engine.state_changes import KINDS
from memfit.engine.undo_state import UndoState

_PLANNING: ContextVar[bool] = ContextVar("planning", default=False)
_REACHED: ContextVar[tuple[Any, ...]] = ContextVar("reached", default=())
"""What planning calls besides the model: the loss function, and functions that cut and weight batches."""


@contextmanager
def kept(model: nn.Module) -> Iterator[UndoState]:
    """Undo afterwards all changes to what the model and the `reaching` roots reach."""
    token = _PLANNING.set(True)
    found = UndoState({id(module.__dict__): name for name, module in model.named_modules()})
    hooks = [hook for kind in KINDS for hook in getattr(nn.modules.module, "_global" + kind, {}).values()]
    hooks = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("memfit.")]
    found.look((model, *hooks, parametrize._cache, *_REACHED.get()))
    try:
        yield found
    finally:
        found.undo()
        _PLANNING.reset(token)


def is_planning() -> bool:
    """Whether side effects of the running code are undone afterwards."""
    return _PLANNING.get()


@contextmanager
def reaching(*roots: Any) -> Iterator[None]:
    """Declare that planning calls these besides the model."""
    token = _REACHED.set((*_REACHED.get(), *roots))
    try:
        yield
    finally:
        _REACHED.reset(token)
