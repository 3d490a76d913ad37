"""Runs planning without side effects: what it touches is restored bit for bit, even if it fails or is interrupted.

Covered: random state of every device in use, of Python and of NumPy; train/eval modes; autocast; operator writes to any tensor
that existed before (`write_guard.py`); and what the user's code changes in objects it reaches (`undo_state.py`). The script's
saved-tensor hooks do not run inside. Not covered: files, other processes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.engine.call_context import autocast_kept, modes_as, modes_of, restore_tensors, without_saved_tensors_hooks
from memfit.engine.gradients import is_sharded, reshard_model
from memfit.engine.modules import modules_of
from memfit.engine.places import Place, TensorPlace
from memfit.engine.planning_scope import kept, reaching
from memfit.engine.random_state import random_state_kept
from memfit.engine.shadow_optimizer import stepped_by
from memfit.engine.state_changes import holds
from memfit.engine.undo_state import UndoState
from memfit.tracing.write_guard import UndoLog, writes_undone


@dataclass(frozen=True)
class Traces:
    """What is restored on exit."""

    kept: UndoState
    log: UndoLog | None
    """The log of tensor writes; None if nothing is written for real, or parameters are sharded."""
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Tensors with copies of their values, where there is no log."""

    def moved(self) -> dict[tuple[Any, ...], tuple[Place, Any]]:
        """Returns what differs from before, and tensors that were written: places by their keys, with their previous values."""
        changed = [(tensor, copy) for tensor, copy in self.copies if not holds(tensor, copy)]
        written = self.log.written() if self.log else changed
        tensors = [(TensorPlace(self.kept.holder_of(tensor), self.kept.name_of(tensor)), before) for tensor, before in written]
        found = [*self.kept.moved(), *tensors]
        return {place.key: (place, before) for place, before in found}


    def rewind(self) -> None:
        """Puts back what changed since, so that what runs again does what it did at first: a counter may make it write other
        tensors, which no log has seen."""
        for place, before in self.kept.moved():
            place.put(before)
        if self.log is not None:
            self.log.rewind()


@contextmanager
def leave_no_trace(
    model: nn.Module,
    device: torch.device,
    *,
    real: bool = True,
    watching: bool = True,
    outside: Sequence[torch.Tensor] = (),
) -> Iterator[Traces]:
    """Restores everything listed above on exit. With `real=False` only fake tensors compute, so nothing is written. Without
    `watching`, only writes that `guard.watched` recorded are undone. `outside` are parameters outside the model's modules.
    Yields what is restored."""
    reshard_model(model)
    held = [(p, p.detach(), p.grad) for p in (*model.parameters(), *outside)]
    in_parts = is_sharded(model)
    with (
        autocast_kept((device.type, "cpu", "cuda")),
        random_state_kept(device),
        modes_as(modes_of(modules_of(model))),
        without_saved_tensors_hooks(),
        kept(model) as found,
        writes_undone(watching=watching) if real and not in_parts else nullcontext() as log,
    ):
        state = {id(t): t for t in (*model.buffers(), *found.small_tensors())} if real and in_parts else {}
        copies = [(tensor, tensor.detach().clone()) for tensor in state.values()]
        try:
            yield Traces(found, log, copies)
        finally:
            reshard_model(model)
            restore_tensors(copies)
            for p, data, gradient in held:
                if p.untyped_storage()._cdata != data.untyped_storage()._cdata:
                    p.data = data
                p.grad = gradient


@contextmanager
def steps_undone(optimizer: Any, device: torch.device, *, real: bool = True, watching: bool = True) -> Iterator[Traces | None]:
    """Restores on exit what the script's own code changes when a shadow of its optimizer steps: random state, generators,
    schedulers and averages that it holds, counters. Optimizers of torch change nothing else: yields None for them. The other
    arguments are those of `leave_no_trace`."""
    own = [each for each in stepped_by(optimizer) if not type(each).__module__.startswith("torch.optim.")]
    if not own:
        yield None
        return
    with reaching(*map(type, own), *map(vars, own)):
        with leave_no_trace(nn.Module(), device, real=real, watching=watching) as traces:
            yield traces


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Disables automatic garbage collection, so that two traces of the same step free in the same order."""
    gc.collect(1)  # a full collection would take a fifth of a second with transformers loaded
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
