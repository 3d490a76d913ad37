"""Computes batch norm's running statistics of the whole effective batch from the moments of its micro-batches.

While micro-batches run, momentum is 1, so each batch norm's buffers hold that micro-batch's moments. These are combined (Chan,
Golub and LeVeque, 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances") and applied once. Samples
are still normalized by their own micro-batch's statistics. Not covered: instance norm with running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memfit.engine.call_context import restore_tensors

BatchNorm = nn.modules.batchnorm._BatchNorm
Gather = Callable[[Any], Sequence[Any]]
"""All-gathers an object: takes one rank's, returns every rank's."""


@dataclass
class _SeenMoments:
    """What one batch norm saw in each call: entries per channel, their sum, the sum of their squares."""

    module: nn.Module
    momentum: float | None
    before: list[torch.Tensor]
    calls: list[torch.Tensor] = field(default_factory=list)

    def hook(self, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputation of a checkpointed block
        count = args[0].numel() // args[0].shape[1]
        mean, variance = (t.detach().double() for t in (module.running_mean, module.running_var))
        squares = variance * (count - 1) + count * mean * mean
        self.calls.append(torch.stack([torch.full_like(mean, count), mean * count, squares]))

    def per_forward(self, forwards: int) -> list[torch.Tensor]:
        """Return the combined moments of all micro-batches, for each call of the module in a forward."""
        each, rest = divmod(len(self.calls), forwards)
        if rest:
            return [torch.stack(self.calls).sum(0)]
        return [torch.stack(self.calls[i::each]).sum(0) for i in range(each)]


class WholeNorms:
    """Keeps a model's running batch norm statistics those of whole effective batches."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pending: list[tuple[_SeenMoments, list[torch.Tensor]]] = []

    @contextmanager
    def gathered(self, forwards: int) -> Iterator[None]:
        """Runs `forwards` micro-batches inside. Their moments then wait for `applied`."""
        found = [m for m in self._model.modules() if isinstance(m, BatchNorm) and m.training and m.running_mean is not None]
        seen = [_SeenMoments(m, m.momentum, [b.clone() for b in m._buffers.values() if b is not None]) for m in found]
        hooks = [each.module.register_forward_hook(each.hook) for each in seen]
        for module in found:
            module.momentum = 1.0
        try:
            yield
        finally:
            for each, hook in zip(seen, hooks):
                hook.remove()
                each.module.momentum = each.momentum  # type: ignore[assignment]
                restore_tensors(list(zip((b for b in each.module._buffers.values() if b is not None), each.before)))
        self._pending = [(each, each.per_forward(forwards)) for each in seen if each.calls]

    def applied(self, gather: Gather | None = None, *, counts: bool = True) -> None:
        """Writes the waiting moments to the buffers. `gather` sums them over all ranks, except ranks that do not count."""
        pending, self._pending = self._pending, []
        moments = [each for _, each in pending]
        if gather is not None:
            told = [each for each in gather([[m.cpu() for m in each] for each in moments] if counts else []) if each]
            moments = [[torch.stack(same).sum(0) for same in zip(*module)] for module in zip(*told)]
        for (each, _), all_moments in zip(pending, moments):
            for one in all_moments:
                _update(each.module, each.momentum, one.to(each.module.running_mean.device))  # type: ignore[union-attr]


def _update(module: Any, momentum: float | None, moments: torch.Tensor) -> None:
    """Update the running statistics once, as torch.nn.BatchNorm does."""
    count, mean, squares = moments[0], moments[1] / moments[0], moments[2]
    variance = (squares - count * mean * mean) / (count - 1)
    number = module.num_batches_tracked
    new = [] if number is None else [(number, number + 1)]
    factor = 1.0 / float(number + 1) if momentum is None else momentum  # pyright: ignore[reportOptionalOperand]
    for buffer, value in ((module.running_mean, mean), (module.running_var, variance)):
        new.append((buffer, buffer * (1 - factor) + value.to(buffer) * factor))
    restore_tensors(new)  # kept activations may hold the buffers
