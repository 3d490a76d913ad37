"""Loss scale for gradient accumulation in float16: the script's own factor (GradScaler) arrives only in its backward.

Starts at the last factor. If gradients overflow, the batch runs again at a lower scale, even below 1, so that an overflow is
handed over only if the gradient times the script's factor overflows. Not covered: intermediate gradients that overflow at any
scale that does not flush the rest to zero; they are handed over as in plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfit.engine.call_context import Autocast, autocast_now
from memfit.engine.handover import Total
from memfit.engine.known_means import nodes_of
from memfit.engine.recovery import RestartBatch
from memfit.engine.totals import wide

START = 2.0**16
"""Initial scale, as in torch.amp.GradScaler."""
GROWTH_INTERVAL = 2000
"""Batches without overflow until the scale doubles, as in GradScaler."""
SMALLEST = 2.0**-16
"""Minimum scale. Gradients that are not finite at it have another cause."""


class LossScale:
    """The loss scale for gradient accumulation in float16."""

    def __init__(self) -> None:
        self.scale = START
        self._good = 0
        self._before: float | None = None
        self._incoming: torch.Tensor | None = None
        """The factor of the script's latest backward. Read from the device together with the next batch's result."""

    @property
    def state(self) -> tuple[float, int]:
        """The scale, and the number of batches since it changed."""
        self._are_finite([])
        return self.scale, self._good

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        self.scale, self._good = state

    def accept(self, total: Total) -> Total:
        """Return `total` if it is finite or cannot be made so. If it overflowed, set a lower scale and raise RestartBatch."""
        if not self._are_finite(total.gradients):
            if self.scale > SMALLEST and bool(torch.isfinite(total.value)):
                self._lower()
                raise RestartBatch
            # No scale helped: the next batch starts with this one's first scale.
            self.scale = self._before or self.scale
        self._before = None
        self._good += 1
        if self._good % GROWTH_INTERVAL == 0:
            self.scale *= 2.0
        return total

    def _are_finite(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the gradients are finite. Also reads the script's latest factor, so that one synchronization is enough."""
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
        """Record the factor of the script's backward."""
        self._incoming = incoming.detach().reshape(())


def computes_in_half(
    tensors: Sequence[torch.Tensor], device_type: str, precision: str, autocast: Sequence[Autocast] = ()
) -> bool:
    """Return whether gradients may be float16: due to the precision lever, the script's autocast (now or at the call), or the
    dtype of the tensors."""
    if precision == "float16":
        return True
    if any(state.enabled and state.dtype is torch.float16 for state in (*autocast, *autocast_now((device_type,)))):
        return True
    return any(t.dtype is torch.float16 for t in tensors)


class HalfGraphs:
    """Detects float16 gradients in a loss's graph, as models and losses may enter autocast themselves.

    Checks batches 1, 2, 4, 8, ... until some are seen. Not covered: compiled code and reentrant checkpoints with float32
    inputs and outputs, whose graphs hide what is inside.
    """

    def __init__(self) -> None:
        self.seen = False
        self._batches = 0

    def looks(self) -> bool:
        """Whether the batch that starts is checked."""
        self._batches += 1
        return not self.seen and self._batches & (self._batches - 1) == 0

    def look(self, loss: torch.Tensor) -> None:
        """Check the graph of a loss. Raises RestartBatch the first time it has float16 gradients, which need a scaled loss."""
        if any(meta.dtype is torch.float16 for node in nodes_of([loss]) for meta in node._input_metadata):
            self.seen = True
            raise RestartBatch


def _largest(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The largest magnitude, on the device; not finite if any value is not."""
    dense = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in gradients if g is not None]
    norms = torch._foreach_norm([g for g in dense if g.numel()], math.inf)  # pyright: ignore[reportPrivateImportUsage]
    device = dense[0].device
    return torch.stack([norm.to(device, wide(device)) for norm in norms] or [torch.zeros((), device=device)]).max()
