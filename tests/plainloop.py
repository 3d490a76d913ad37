"""A plain PyTorch loop on real tensors, recorded: what traces of such a loop are compared with."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.autotune.settings import Settings
from memfit.batches.tree import map_leaves, tensors
from memfit.hardware.budget import probe
from memfit.kernels.onednn import stages
from memfit.modes.step_mode import Stepper
from memfit.profiling.loop import MEMFITS, Loop
from memfit.profiling.profile import Profile
from memfit.profiling.timeline import Timeline
from memfit.runtime.core import Core
from memfit.tracing.ledger import Ledger

CPU = torch.device("cpu")
LossFn = Callable[[nn.Module, Any], Tensor]


def traced(
    model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, batch: Any, loop: Loop, blocks: tuple[str, ...] = ()
) -> Profile:
    """The profile of a loop by tracing alone, without timing anything."""
    core = Core(model, optimizer, CPU, probe(device=CPU), Settings(loop=loop), compiled=False)
    task = Stepper(core, loss_fn, lambda batch: loss_fn(model, batch)).task(batch)
    return core.planner.profile(task, "off", blocks)


def first(batch: Any, samples: int) -> Any:
    """So many samples of a batch, in memory of their own."""
    return map_leaves(lambda leaf: leaf[:samples].clone() if isinstance(leaf, Tensor) else leaf, batch)


@contextmanager
def by_hand() -> Iterator[None]:
    """No garbage collection at chance moments."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class PlainLoop:
    """Lines of a script, and between them what a ledger is told. Variables are attributes: they stay bound."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, batch: Any, samples: int, loop: Loop = MEMFITS
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.loop = model, optimizer, loss_fn, loop
        self._whole, self._samples = batch, first(batch, samples)
        self.batch = self.out = self.loss = None
        self.ledger = Ledger(CPU, inside=stages)

    def steps(self, count: int) -> Timeline:
        """The last of so many steps."""
        handle = self.model.register_forward_hook(self._returned)
        with by_hand(), self.ledger:
            self.ledger.present(self.model.parameters(), "parameters")
            self.ledger.present(self.model.buffers(), "buffers")
            self.ledger.present(tensors(list(self.optimizer.state.values())), "optimizer")  # some make it at once
            for _ in range(count):
                self.ledger.restart()
                self._step()
            found = self.ledger.timeline()
        handle.remove()
        return found

    def evaluation(self, samples: int) -> Timeline:
        """Two batches of an evaluation after a step."""
        batch = first(self._whole, samples)
        handle = self.model.register_forward_hook(self._returned)
        with by_hand(), self.ledger:
            self._step()
            self.batch = self.out = self.loss = None
            self.ledger.restart()
            self.model.eval()
            with torch.no_grad():
                for _ in range(2):
                    self.ledger.phase("input")
                    self._next(batch)
                    self.ledger.phase("evaluation")
                    self.loss = self.loss_fn(self.model, self.batch)
            self.model.train()
            found = self.ledger.timeline()
        handle.remove()
        return found

    def _step(self) -> None:
        ledger, zero_grad = self.ledger, self.loop.zero_grad
        ledger.window()
        ledger.phase("input")
        self._next(self._samples)
        if zero_grad in ("before forward", "to zero"):
            self.optimizer.zero_grad(set_to_none=zero_grad != "to zero")
        ledger.phase("forward")
        self.loss = self.loss_fn(self.model, self.batch)
        if zero_grad == "before backward":
            self.optimizer.zero_grad()
        ledger.phase("backward")
        self.loss.backward()
        ledger.phase("hand over")
        if self.loop.clips:
            ledger.phase("clip")
        if self.loop.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.loop.max_grad_norm)
        if self.loop.clip_grad_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.loop.clip_grad_value)
        ledger.phase("optimizer")
        self.optimizer.step()
        if zero_grad == "after step":
            self.optimizer.zero_grad()

    def _next(self, samples: Any) -> None:
        batch = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, samples)
        self.ledger.present(tensors(batch), "input")
        self.batch = batch

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self.out = output


def peaks(timeline: Timeline, samples: int) -> dict[str, int]:
    """Most bytes alive in each phase; of a training step, with one micro-batch. (A plain loop hands nothing over.)"""
    phases = [*((phase.name, phase.start) for phase in timeline.phases), ("", len(timeline.event))]
    over = dict(phases).get("hand over")
    curve = timeline.curve(samples, accumulates=over is None)
    found: dict[str, int] = {}
    for (name, start), (_, stop) in itertools.pairwise(phases):
        later = over is not None and len(timeline.window) > 1 and timeline.window[1] <= start <= over
        if not later and name != "hand over":
            begin = start if start == over and len(timeline.window) > 1 else max(0, start - 1)
            found[name] = max(found.get(name, 0), int(curve[begin:stop].max(initial=0.0)))
    return found
