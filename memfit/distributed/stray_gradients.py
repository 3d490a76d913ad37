"""Averages (all-reduce) gradients that bypass the forward: through `model.logit_scale` in the script's loss, or an unlisted
method.

Each rank has only its own. At the end of the user's backward they become the mean across ranks, weighted by samples where
every rank knows how many it has, else equally, as in DistributedDataParallel. The rest of a parameter's gradient is the same
on every rank, and the mean does not change it. Backwards 1, 2, 4, 8, 16, 32, 48, ... search for the parameters concerned:
those whose gradients differ between ranks. Not covered: sparse gradients, and gradients that start to bypass between two
searches. Parameters then differ between ranks, which the next search finds and refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit._errors import Refused
from memfit.distributed.reduction import StepReduction
from memfit.engine.totals import wide
from memfit.hardware.exhausted import retry_on_oom

LEVELLING = "gradients that parameters receive outside the forward"
APART = 1e-9
"""Relative difference from which two ranks' gradient sums are different. Two kinds of processor differ by less in the same
sum; one rounding of a single float32 element makes more."""
OFTEN = 16
"""Maximum number of backwards between two searches."""
NOTHING = (0.0, 0.0, 0.0)
UNKNOWN = -1.0


class StrayGradients:
    """Averages gradients of `reduction`'s parameters at the end of backwards that combined a total across ranks. `say` receives
    the names of new parameters that need it, taken from `model`; `samples` returns the samples of this rank's batch (0: a
    placeholder), if known; `aside` returns whether memfit itself is computing."""

    def __init__(
        self,
        reduction: StepReduction,
        model: nn.Module,
        say: Callable[[str], None],
        samples: Callable[[], int | None],
        aside: Callable[[], bool],
    ) -> None:
        self._reduction, self._model, self._say, self._samples, self._aside = reduction, model, say, samples, aside
        self._known: dict[int, torch.Tensor] = {}
        self._backwards = 0
        self._task: int | None = None
        self._levelled = self._combined = False
        self._alike = False
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Average at the end of any backward of the script that reaches the model, until one goes through the forward."""
        if not self._hooks:
            wanted = [p for p in self._model.parameters() if p.requires_grad]
            self._hooks = [p.register_hook(lambda _: self._reached()) for p in wanted]

    def combined(self) -> None:
        """Note that the running backward reduced a total across ranks."""
        self._combined = True
        self.undo()
        self.level_later()

    def undo(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _reached(self) -> None:
        if not self._aside():
            self.level_later()

    def level_later(self) -> None:
        """Average at the end of the running backward, from inside it."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self.level)

    def level_before_step(self) -> None:
        """Average now if no backward since the last step did, as none of them went through the forward. Clipping came before
        that, on each rank by itself; from now on it comes after."""
        levelled, self._levelled = self._levelled, False
        if not levelled and any(p.grad is not None for p in self._reduction.parameters):
            self.level()
            self.watch()
            self._levelled = False

    def level(self) -> None:
        """Replace gradients that differ between ranks by their mean."""
        self._task, self._levelled = None, True
        self._backwards += 1
        with self._reduction.announcing(), torch.no_grad():
            if not self._combined:
                self._reduction.part = self._own_part()
            self._combined = False
            there = self._looked_at() if self._looks else self._there()
            if there:
                self._mean(there)

    def _own_part(self) -> float:
        """This rank's fraction of the samples; of the ranks, if one of them does not know its samples."""
        own, ranks = self._samples(), self._reduction.ranks
        told = [number for (number,) in self._agreed([UNKNOWN if own is None else float(own)])]
        self._alike = UNKNOWN in told or not sum(told)
        return 1 / len(told) if self._alike else told[ranks.rank] / sum(told)

    @property
    def _looks(self) -> bool:
        """Whether to search for parameters concerned: in backwards 1, 2, 4, 8, 16, 32, 48, ..."""
        number = self._backwards
        return not number % OFTEN or not number & (number - 1)

    def _looked_at(self) -> list[torch.Tensor]:
        """The parameters with gradients that differ between ranks, which become known ones."""
        parameters = self._reduction.parameters
        told = self._agreed([number for p in parameters for number in _sums(p.grad)])
        width = len(NOTHING)
        rows = [[numbers[i : i + width] for numbers in told] for i in range(0, width * len(parameters), width)]
        differing = [p for p, row in zip(parameters, rows) if _differ(row)]
        self._learn([p for p in differing if id(p) not in self._known])
        there = {id(p) for p, row in zip(parameters, rows) if any(sums[0] for sums in row)}
        return [p for p in self._known.values() if id(p) in there]

    def _there(self) -> list[torch.Tensor]:
        """Known parameters with a gradient on any rank."""
        known = list(self._known.values())
        if not known:
            return []
        told = self._agreed([float(p.grad is not None) for p in known])
        return [p for p, any_ in zip(known, map(any, zip(*told))) if any_]

    def _agreed(self, numbers: Sequence[float]) -> list[list[float]]:
        return self._reduction.ranks.agree(numbers, LEVELLING)

    def _learn(self, parameters: Sequence[torch.Tensor]) -> None:
        if not parameters:
            return
        self._part_for(parameters)
        self._known |= {id(p): p for p in parameters}
        how = "all alike, as under DistributedDataParallel: memfit sees no number of samples"
        how = how if self._alike else "weighted by samples, where DistributedDataParallel weights all alike"
        self._say(
            f"{self._names(parameters)} received gradients outside the model's forward and the methods listed: they are "
            f"averaged over processes, {how}"
        )

    def _part_for(self, parameters: Sequence[torch.Tensor]) -> float:
        """This rank's weight in a mean of these. Raises Refused if totals were summed: a mean would change the rest of their
        gradients."""
        if self._reduction.part is None:
            raise Refused(
                "a sum as the loss over all processes",
                found=f"{self._names(parameters)} also received gradients outside the model's forward, which add up "
                "separately",
                next_move="divide the loss by the number of samples, or compute it in the model's forward or in loss_fn=",
            )
        return self._reduction.part

    def _names(self, parameters: Sequence[torch.Tensor]) -> str:
        by_id = {id(p): name for name, p in self._model.named_parameters()}
        return ", ".join(by_id.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in parameters)

    def _mean(self, parameters: Sequence[torch.Tensor]) -> None:
        part, device = self._part_for(parameters), self._reduction.ranks.device
        own = [retry_on_oom(partial(_weighed, p, part), device) for p in parameters]
        for parameter, mean in zip(parameters, self._reduction.reduced(own)):
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.copy_(mean)


def _weighed(parameter: torch.Tensor, part: float) -> torch.Tensor:
    """This rank's summand of the mean: zero if its weight is 0, whatever its gradient."""
    nothing = parameter.grad is None or not part
    return torch.zeros_like(parameter) if nothing else (parameter.grad * part).contiguous()  # type: ignore[operator]


def _sums(gradient: torch.Tensor | None) -> tuple[float, float, float]:
    """Whether there is a gradient, and two numbers that different gradients do not share."""
    if gradient is None or gradient.layout is not torch.strided:
        return NOTHING
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    flat, dtype = real.reshape(-1), wide(gradient.device)
    total, norm = torch.stack([flat.sum(dtype=dtype), torch.linalg.vector_norm(flat, dtype=dtype)]).tolist()
    return 1.0, total, norm


def _differ(sums: Sequence[Sequence[float]]) -> bool:
    """Whether these sums of one parameter, a row per rank, are of different gradients. (After a reduction, non-finite values
    are so on every rank.)"""
    first = sums[0]
    return any(not _same(a, b, first[2]) for other in sums[1:] for a, b in zip(first, other))


def _same(a: float, b: float, scale: float) -> bool:
    if not math.isfinite(a) or not math.isfinite(b):
        return math.isnan(a) == math.isnan(b) and (math.isnan(a) or a == b)
    return abs(a - b) <= APART * max(abs(a), abs(b), scale if math.isfinite(scale) else 0.0)
