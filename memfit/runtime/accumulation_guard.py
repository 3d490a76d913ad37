"""Detects a script that already accumulates gradients, before the extra gradients reach an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit._errors import UsageError


class AccumulationGuard:
    """Counts loader batches whose gradients accumulate without an optimizer step or zero_grad in between.

    Nothing is patched: a gradient that is the same tensor at the same version as at the end of the last backward has not been
    zeroed, clipped or used since.
    """

    def __init__(self, target_batch: int, allowed: int) -> None:
        self._target_batch, self._allowed = target_batch, allowed
        self._batch: int | None = None
        self._batches = 0
        self._seen: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def stepped(self) -> None:
        """Note that the optimizer took a step: a new effective batch follows."""
        self._batches, self._seen = 0, None

    def handing_over(self, batch: int, receivers: Sequence[torch.Tensor]) -> None:
        """Note that gradients of loader batch `batch` are about to be accumulated. Raises UsageError if that makes more batches
        than were declared."""
        if batch != self._batch:
            self._batches = self._batches + 1 if self._still_there() else 1
            self._batch = batch
            if self._batches > self._allowed:
                self._batch = None
                raise self._error()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._remember(receivers))  # type: ignore[attr-defined]

    def _remember(self, receivers: Sequence[torch.Tensor]) -> None:
        for p in receivers:
            if p.grad is not None:
                self._seen = (p, p.grad, p.grad._version)
                return

    def _still_there(self) -> bool:
        if self._seen is None:
            return False
        parameter, gradient, version = self._seen
        return parameter.grad is gradient and gradient._version == version

    def _error(self) -> UsageError:
        several = "several iterations" if self._allowed == 1 else f"more than {self._allowed} iterations"
        return UsageError(
            f"target_batch={self._target_batch} samples per optimizer step",
            found=f"your loop runs {several} per optimizer.step(): the gradients of another loader batch are still there",
            next_move="pass script_accumulation=8 (or as many as your loop runs), or remove the accumulation from your loop",
        )
