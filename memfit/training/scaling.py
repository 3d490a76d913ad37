"""The loss scale while gathering float16 gradients: the script's own factor arrives only at its backward.

Gathering starts at the last factor seen; where gradients overflow the batch runs again at a lower one, below 1 too. So an
overflow is handed over only if the gradient itself, times the script's factor, overflows. Not covered: gradients that would
overflow on the way at any scale that leaves something of them; those are handed over as plain PyTorch would have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfit.engine.accumulate import wide
from memfit.engine.context import Autocast, autocast_now
from memfit.engine.handover import Total
from memfit.engine.terms import nodes_of
from memfit.training.recover import Again

START = 2.0**16
"""Where torch.amp.GradScaler starts, too."""
GROWTH_INTERVAL = 2000
"""Batches without overflow after which the scale is doubled again, as GradScaler does."""
SMALLEST = 2.0**-16
"""The scale at which nothing lower is tried: what still is not finite is so for another reason."""


class LossScale:
    """The scale in use while gathering in float16."""

    def __init__(self) -> None:
        self.scale = START
        self._good = 0
        self._before: float | None = None
        self._incoming: torch.Tensor | None = None
        """The factor that the script's latest backward came with; read together with what the next batch says."""

    @property
    def state(self) -> tuple[float, int]:
        """The scale, and the batches since it changed."""
        self._are_finite([])
        return self.scale, self._good

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        self.scale, self._good = state

    def accept(self, total: Total) -> Total:
        """`total` if it is finite, or cannot be made so. Raises Again, with a lower scale set, if it overflowed."""
        if not self._are_finite(total.gradients):
            if self.scale > SMALLEST and bool(torch.isfinite(total.value)):
                self._lower()
                raise Again
            # No scale helped: the next batch begins where this one did.
            self.scale = self._before or self.scale
        self._before = None
        self._good += 1
        if self._good % GROWTH_INTERVAL == 0:
            self.scale *= 2.0
        return total

    def _are_finite(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether gradients are; takes the script's latest factor in, as waiting for the device once is enough."""
        numbers = [_largest(gradients)] if any(gradient is not None for gradient in gradients) else []
        if self._incoming is not None:
            own = self._incoming.abs()
            numbers.append(own.to(numbers[0]) if numbers else own)
        found = torch.stack(numbers).tolist() if numbers else []
        if self._incoming is not None:
            self._follow(found.pop())
            self._incoming = None
        return all(map(math.isfinite, found))

    def _follow(self, factor: float) -> None:
        if factor > 1.0:
            self.scale = min(factor, self.scale) if self._good else factor

    def _lower(self) -> None:
        self._before = self._before or self.scale
        self.scale = max(SMALLEST, self.scale / 16)
        self._good = 0

    def seen(self, incoming: torch.Tensor) -> None:
        """The factor with which the script's backward arrived."""
        self._incoming = incoming.detach().reshape(())


def computes_in_half(
    tensors: Sequence[torch.Tensor], device_type: str, precision: str, autocast: Sequence[Autocast] = ()
) -> bool:
    """Whether gradients may be float16 on the way: by the lever, the script's autocast now or where it called the model, or its
    parameters."""
    if precision == "float16":
        return True
    if any(state.enabled and state.dtype is torch.float16 for state in (*autocast, *autocast_now((device_type,)))):
        return True
    return any(t.dtype is torch.float16 for t in tensors)


class HalfGraphs:
    """Whether gradients are float16 on the way of a loss, read off its graph: models and losses may enter autocast themselves.

    Looked at in batches 1, 2, 4, 8, ..., and no longer once it was seen. Not covered: graphs of compiled code and of reentrant
    checkpoints, which do not show what is inside, where what they take and give is float32.
    """

    def __init__(self) -> None:
        self.seen = False
        self._batches = 0

    def looks(self) -> bool:
        """Whether the batch that begins is looked at."""
        self._batches += 1
        return not self.seen and self._batches & (self._batches - 1) == 0

    def look(self, loss: torch.Tensor) -> None:
        """Look at the graph of a loss. Raises Again where it is seen for the first time, as that loss has to be scaled."""
        if any(meta.dtype is torch.float16 for node in nodes_of([loss]) for meta in node._input_metadata):
            self.seen = True
            raise Again


def _largest(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The largest magnitude in them, on their device; not finite where one is not."""
    dense = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in gradients if g is not None]
    norms = torch._foreach_norm([g for g in dense if g.numel()], math.inf)  # pyright: ignore[reportPrivateImportUsage]
    device = dense[0].device
    return torch.stack([norm.to(device, wide(device)) for norm in norms] or [torch.zeros((), device=device)]).max()
