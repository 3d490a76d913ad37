"""Noticing training that goes around the model's forward, by submodules or own methods, and so runs whole.

Told by what an optimizer step found: gradients, and no call of the forward. Not covered: submodules and own methods called in a
step in which the forward is called too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


class OutsideForward:
    """Whether a model is trained outside its forward; `say` is told so, once per wording."""

    def __init__(self, model: nn.Module, say: Callable[[str], None]) -> None:
        self._model, self._say, self._called = model, say, False

    def called(self) -> None:
        """The model's forward was called."""
        self._called = True

    def stepped(self) -> None:
        """The optimizer took a step."""
        called, self._called = self._called, False
        if not called and any(p.grad is not None for p in self._model.parameters()):
            self._tell([name for name, child in self._model.named_children() if _has_gradients(child)])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at one computation of a loss."""
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
