"""Noticing what of a model runs with gradients outside its forward, and so whole: submodules and own methods.

Looked at in the first optimizer steps only, through torch's hook for all modules, so that the model itself carries no trace.
Not covered: own methods that call no submodule in a step in which the forward is called too; compiled models.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

STEPS = 2
"""Optimizer steps that are looked at."""


class OutsideForward:
    """What of a model ran outside its forward; `inside()` tells whether its forward, or memfit, is at work."""

    def __init__(self, model: nn.Module, inside: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._model, self._inside, self._say = model, inside, say
        self._names = {id(module): name for name, module in model.named_modules() if name}
        self._seen: list[str] = []
        self._called, self._steps = False, 0
        self._remove: Callable[[], None] | None = None

    def watch(self) -> None:
        """Begin to look. What is watched may go meanwhile: torch's list of hooks does not keep it."""
        me = weakref.ref(self)

        def before(module: nn.Module, args: Any) -> None:
            watcher = me()
            if watcher is None:
                handle.remove()
            else:
                watcher._before(module)

        handle = nn.modules.module.register_module_forward_pre_hook(before)
        self._remove = handle.remove

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at one computation of a loss, and say what was seen."""
        if self._steps < STEPS:
            self.watch()
        try:
            yield
            self.stepped()
        finally:
            self.stop()

    def stop(self) -> None:
        """Look no longer."""
        if self._remove is not None:
            self._remove()
        self._remove = None

    def called(self) -> None:
        """The model's forward was called."""
        self._called = True

    def stepped(self) -> None:
        """The optimizer took a step: say what was seen, and stop when that was enough."""
        if self._remove is None:
            return
        what = self._seen or ([] if self._called or not self._has_gradients() else ["a method of its own"])
        self._steps, self._called = self._steps + 1, False
        if what:
            model = type(self._model).__name__
            self._say(
                f"{', '.join(what)} ran outside the forward of {model}, whole: memfit could not cut it; call the model itself, "
                "or pass loss_fn="
            )
        if what or self._steps >= STEPS:
            self.stop()

    def _before(self, module: nn.Module) -> None:
        name = self._names.get(id(module))
        if name is None or not torch.is_grad_enabled() or self._inside() or _in_backward():
            return
        within = any(name.startswith(f"{seen}.") for seen in self._seen)
        if name not in self._seen and not within and any(p.requires_grad for p in module.parameters()):
            self._seen.append(name)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._model.parameters())


def _in_backward() -> bool:
    """Whether a backward runs: what is checkpointed runs again in it."""
    query = getattr(torch._C, "_current_graph_task_id", None)
    return query is not None and query() != -1
