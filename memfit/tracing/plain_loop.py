"""What a plain training loop does differently from memfit's engine, for a trace: its variables hold their values until the next
assignment, its gradients accumulate in the parameters themselves, and it may clip them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from memfit.batches.tree import tensors
from memfit.engine.staged import Staging
from memfit.profiling.loop import Loop
from memfit.tracing.ledger import Ledger

BY_LISTS = ("cpu", "cuda", "xpu")
"""Devices where torch clips all gradients at once, with foreach (`_has_foreach_support` in torch/utils/_foreach_utils.py)."""


class Directly(Staging):
    """Accumulates gradients in the parameters, in their own precision: there is nothing to hand over."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Leaves the model unchanged."""
        yield

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns no gradients: they are already in the parameters."""
        return [None] * len(parameters)


class Variables:
    """The variables of a loop (`batch`, `outputs`, `loss`): each holds its value until the next assignment."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._batch: Any = None
        self._outputs: list[Any] = []
        self._loss: Any = None
        self._fresh = False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Assigns what `model` returns inside the context to the outputs."""
        handle = model.register_forward_hook(lambda module, args, output: self._returned(output))
        try:
            yield
        finally:
            handle.remove()
            self.clear()

    def hold_batch(self, batch: Any) -> None:
        """`batch = next(loader)`: the next batch exists before the previous one is freed."""
        self._batch, self._fresh = batch, True

    def hold_loss(self, loss: Any) -> None:
        """`loss = ...`."""
        self._ledger.beside(tensors(loss))
        self._loss = loss

    def clear(self) -> None:
        """Deletes all variables."""
        self._batch, self._outputs, self._loss = None, [], None

    def _returned(self, output: Any) -> None:
        """`outputs = model(batch)`; if a batch runs through the model more than once, all outputs are held."""
        self._ledger.beside(tensors(output))
        if self._fresh:
            self._outputs, self._fresh = [output], False
        else:
            self._outputs.append(output)


def clip(parameters: Iterable[torch.Tensor], loop: Loop, device: str) -> None:
    """Clips the gradients of `parameters` as the loop does, with torch's own functions. torch chooses foreach by the type of
    tensors, and fake tensors have another type, so `device` decides here."""
    parameters, by_lists = list(parameters), device in BY_LISTS or None
    if loop.max_grad_norm is not None:
        clip_grad_norm_(parameters, loop.max_grad_norm, foreach=by_lists)
    if loop.clip_grad_value is not None:
        clip_grad_value_(parameters, loop.clip_grad_value, foreach=by_lists)
