"""Detects training that bypasses the model's forward through submodules or other methods, and so runs uncut.

The sign is an optimizer step with gradients but no call of the forward. Not covered: submodules and methods called in a step
that also calls the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


class OutsideForward:
    """Warns through `say` if a model is trained outside its forward, once per wording."""

    def __init__(self, model: nn.Module, say: Callable[[str], None]) -> None:
        self._model, self._say, self._called = model, say, False

    def called(self) -> None:
        """Records a call of the model's forward."""
        self._called = True

    def stepped(self) -> None:
        """Checks the gradients at an optimizer step."""
        called, self._called = self._called, False
        if not called and any(p.grad is not None for p in self._model.parameters()):
            self._tell([name for name, child in self._model.named_children() if _has_gradients(child)])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Checks one computation of a loss."""
        self._called = False
        yield
        if not self._called:
            self._tell([])

    def _tell(self, names: list[str]) -> None:
        what = ", ".join(names) or "a method of its own"
        self._say(
            f"{what} ran outside the forward of {type(self._model).__name__}, whole: memfit could not cut it; call the model "
            "itself, or pass loss_fn="
        )


def _has_gradients(module: nn.Module) -> bool:
    return any(p.grad is not None for p in module.parameters())
