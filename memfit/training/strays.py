"""Gradients that parameters receive around the model, of a script in several processes: through `model.logit_scale` in its own
loss, or an own method that is not listed.

Each process has only its own of them. At the end of the user's backward they are made the mean over processes, weighed by
samples, as under DistributedDataParallel. Whatever else is in a parameter's gradient by then is the same on every process, and
a mean leaves it as it is. Which parameters are concerned is looked for in backwards 1, 2, 4, 8, 16, 32, 48, ...: those whose
gradients differ between processes. Not covered: sparse gradients, and what begins between two looks; parameters then differ
between processes, which is found at the next and refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit._errors import Refused
from memfit.engine.accumulate import wide
from memfit.hardware.exhausted import patiently
from memfit.training.together import Together

LEVELLING = "gradients that parameters receive outside of the forward"
APART = 1e-9
"""Relative difference of what two processes' gradients add up to from which on they are taken to differ: what two kinds of
processor make of the same sum is smaller, one rounding of a single element in float32 larger."""
OFTEN = 16
"""Backwards between two looks at most."""
NOTHING = (0.0, 0.0, 0.0)


class Strays:
    """Levels the gradients of the parameters that `together` knows, at the end of backwards in which it has combined; `say` is
    told of those of `model` and others that need it; `samples` gives those of this process's batch, where they are
    known, and `aside` whether memfit itself is computing."""

    def __init__(
        self,
        together: Together,
        model: nn.Module,
        say: Callable[[str], None],
        samples: Callable[[], int | None],
        aside: Callable[[], bool],
    ) -> None:
        self._together, self._model, self._say, self._samples, self._aside = together, model, say, samples, aside
        self._known: dict[int, torch.Tensor] = {}
        self._backwards = 0
        self._task: int | None = None
        self._levelled = self._combined = False
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Until a backward comes through the forward: level at the end of any of the script's that reaches the model."""
        if not self._hooks:
            wanted = [p for p in self._model.parameters() if p.requires_grad]
            self._hooks = [p.register_hook(lambda _: self._reached()) for p in wanted]

    def combined(self) -> None:
        """A total became that of all processes, in the backward that is running."""
        self._combined = True
        self.undo()
        self.level_later()

    def undo(self) -> None:
        """No longer watch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _reached(self) -> None:
        if not self._aside():
            self.level_later()

    def level_later(self) -> None:
        """Level once the backward that is running has come to its end; from inside of one."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self.level)

    def level_before_step(self) -> None:
        """Level now where no backward since the last step has, as none came through the forward, though some did before.
        Gradients were clipped by then, if they are, each process's by itself; from now on that comes after."""
        levelled, self._levelled = self._levelled, False
        if not levelled and any(p.grad is not None for p in self._together.parameters):
            self.level()
            self.watch()
            self._levelled = False

    def level(self) -> None:
        """Make the gradients that differ between processes their mean."""
        self._task, self._levelled = None, True
        self._backwards += 1
        with self._together.announcing(), torch.no_grad():
            if not self._combined:
                weights = [weight for (weight,) in self._agreed([float(self._samples() or 1)])]
                self._together.part = weights[self._together.ranks.rank] / sum(weights)
            self._combined = False
            there = self._looked_at() if self._looks else self._there()
            if there:
                self._mean(there)

    @property
    def _looks(self) -> bool:
        """Whether it is looked for parameters that are concerned: in backwards 1, 2, 4, 8, 16, 32, 48, ..."""
        number = self._backwards
        return not number % OFTEN or not number & (number - 1)

    def _looked_at(self) -> list[torch.Tensor]:
        """The parameters whose gradients differ between processes, from now on known as such."""
        parameters = self._together.parameters
        told = self._agreed([number for p in parameters for number in _sums(p.grad)])
        width = len(NOTHING)
        rows = [[numbers[i : i + width] for numbers in told] for i in range(0, width * len(parameters), width)]
        differing = [p for p, row in zip(parameters, rows) if _differ(row)]
        self._learn([p for p in differing if id(p) not in self._known])
        there = {id(p) for p, row in zip(parameters, rows) if any(sums[0] for sums in row)}
        return [p for p in self._known.values() if id(p) in there]

    def _there(self) -> list[torch.Tensor]:
        """Those of the known that have gradients on any process now."""
        known = list(self._known.values())
        if not known:
            return []
        told = self._agreed([float(p.grad is not None) for p in known])
        return [p for p, any_ in zip(known, map(any, zip(*told))) if any_]

    def _agreed(self, numbers: Sequence[float]) -> list[list[float]]:
        return self._together.ranks.agree(numbers, LEVELLING)

    def _learn(self, parameters: Sequence[torch.Tensor]) -> None:
        if not parameters:
            return
        self._part_for(parameters)
        self._known |= {id(p): p for p in parameters}
        self._say(
            f"{self._names(parameters)} received gradients outside of the model's forward and of the methods listed: they are "
            "the mean over processes, weighed by samples, as under DistributedDataParallel"
        )

    def _part_for(self, parameters: Sequence[torch.Tensor]) -> float:
        """This process's part of a mean of these. Raises Refused where totals were added up: a mean would change what is in
        their gradients already."""
        if self._together.part is None:
            raise Refused(
                "a sum as the loss over all processes",
                found=f"{self._names(parameters)} also received gradients outside of the model's forward, which add up "
                "apart from it",
                next_move="divide the loss by the number of samples, or compute it in the model's forward or in loss_fn=",
            )
        return self._together.part

    def _names(self, parameters: Sequence[torch.Tensor]) -> str:
        by_id = {id(p): name for name, p in self._model.named_parameters()}
        return ", ".join(by_id.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in parameters)

    def _mean(self, parameters: Sequence[torch.Tensor]) -> None:
        part, device = self._part_for(parameters), self._together.ranks.device
        own = [patiently(partial(_weighed, p, part), device) for p in parameters]
        for parameter, mean in zip(parameters, self._together.reduced(own)):
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.copy_(mean)


def _weighed(parameter: torch.Tensor, part: float) -> torch.Tensor:
    """What this process adds to the mean: nothing where it weighs nothing, whatever its gradient is."""
    nothing = parameter.grad is None or not part
    return torch.zeros_like(parameter) if nothing else (parameter.grad * part).contiguous()  # type: ignore[operator]


def _sums(gradient: torch.Tensor | None) -> tuple[float, float, float]:
    """Whether there is a gradient, and two numbers that gradients which differ do not share."""
    if gradient is None or gradient.layout is not torch.strided:
        return NOTHING
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    flat, dtype = real.reshape(-1), wide(gradient.device)
    total, norm = torch.stack([flat.sum(dtype=dtype), torch.linalg.vector_norm(flat, dtype=dtype)]).tolist()
    return 1.0, total, norm


def _differ(sums: Sequence[Sequence[float]]) -> bool:
    """Whether these numbers of the same parameter, one row a process, are of different gradients. (What is not finite is so
    everywhere after a reduction.)"""
    first = sums[0]
    return any(not _same(a, b, first[2]) for other in sums[1:] for a, b in zip(first, other))


def _same(a: float, b: float, scale: float) -> bool:
    if not math.isfinite(a) or not math.isfinite(b):
        return math.isnan(a) == math.isnan(b) and (math.isnan(a) or a == b)
    return abs(a - b) <= APART * max(abs(a), abs(b), scale if math.isfinite(scale) else 0.0)
