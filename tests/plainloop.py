"""A plain PyTorch loop on real tensors, recorded: what traces of such a loop are compared with."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.batches.tree import tensors
from memfit.profiling.ledger import Ledger
from memfit.profiling.loop import MEMFITS, Loop
from memfit.profiling.timeline import Timeline

CPU = torch.device("cpu")
LossFn = Callable[[nn.Module, Any], Tensor]


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
        self, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, make: Callable[[], Any], loop: Loop = MEMFITS
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.make, self.loop = model, optimizer, loss_fn, make, loop
        self.batch = self.out = self.loss = None
        self.ledger = Ledger(CPU)

    def steps(self, count: int) -> Timeline:
        """The last of so many steps."""
        handle = self.model.register_forward_hook(self._returned)
        with by_hand(), self.ledger:
            self.ledger.present(self.model.parameters(), "parameters")
            self.ledger.present(self.model.buffers(), "buffers")
            for _ in range(count):
                self.ledger.restart()
                self._step()
            found = self.ledger.timeline()
        handle.remove()
        return found

    def evaluation(self, make: Callable[[], Any]) -> Timeline:
        """Two batches of an evaluation after a step."""
        handle = self.model.register_forward_hook(self._returned)
        with by_hand(), self.ledger:
            self._step()
            self.batch = self.out = self.loss = None
            self.ledger.restart()
            self.model.eval()
            with torch.no_grad():
                for _ in range(2):
                    self.ledger.phase("input")
                    self._next(make)
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
        self._next(self.make)
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

    def _next(self, make: Callable[[], Any]) -> None:
        batch = make()
        self.ledger.present(tensors(batch), "input")
        self.batch = batch

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self.out = output


def peaks(timeline: Timeline, samples: int) -> dict[str, int]:
    """Most bytes alive in each phase of a step with one micro-batch, that which it begins with included."""
    curve = timeline.curve(samples, accumulates=False) if "hand over" in names(timeline) else timeline.curve(samples)
    found: dict[str, int] = {}
    phases = list(timeline.phases)
    for index, phase in enumerate(phases):
        stop = phases[index + 1].start if index + 1 < len(phases) else len(curve)
        begin = max(0, phase.start - 1) if phase.name != "input" or not index else phase.start
        most = int(curve[begin:stop].max(initial=0.0))
        found[phase.name] = max(found.get(phase.name, 0), most)
    return found


def names(timeline: Timeline) -> list[str]:
    """The phases, in order."""
    return [phase.name for phase in timeline.phases]
