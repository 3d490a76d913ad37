"""Means of known losses inside a micro-batch: made safe for parts without valid entries, their denominators remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.batches.weights import Count, entries_mean, known_loss, valid_mean

# Operations between a mean and the returned loss that keep it proportional to the mean.
_LINEAR = ("Mul", "Div", "Neg", "ToCopy", "Clone", "Alias", "Squeeze", "Unsqueeze", "View", "Mean", "Sum")


@dataclass(frozen=True)
class Term:
    """One known mean met in a micro-batch."""

    mean: torch.Tensor
    """Its value, 0-dim: `entries_mean`, or `valid_mean` where it stands beside other terms."""
    entries: int
    """All its entries, valid or not."""
    count: Count
    """What the true mean divides by."""


class Terms(TorchFunctionMode):
    """While active, means of known losses are computed so that parts can be weighted, and listed in `found`.

    `alone`: the loss is expected to consist of one mean, which is then taken over all entries. Otherwise means stay true
    means, and `shares[k]` multiplies the k-th of them where the true weight of each is known already.
    """

    def __init__(self, *, alone: bool, shares: Sequence[float] | None = None) -> None:
        super().__init__()
        self.found: list[Term] = []
        self._alone = alone
        self._shares = shares

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = known_loss(func)
        if known is None:
            return func(*args, **kwargs)
        bound = known.bind(args, kwargs)
        if bound is None or bound["reduction"] != "mean":
            return func(*args, **kwargs)
        if self._alone:
            self.found.append(Term(*entries_mean(func, bound)))
            return self.found[-1].mean
        mean, count = valid_mean(func, bound)
        self.found.append(Term(mean, 1, count))
        return mean if self._shares is None else mean * self._shares[len(self.found) - 1]


def is_only_term(loss: torch.Tensor, term: Term) -> bool:
    """Whether `loss` depends on the parameters through `term` alone and linearly, read off the autograd graph."""
    node, goal = loss.grad_fn, term.mean.grad_fn
    for _ in range(16):
        if node is goal:
            return node is not None
        following = [] if node is None else [n for n, _ in node.next_functions if n is not None]
        if len(following) != 1 or not node.name().startswith(_LINEAR):  # type: ignore[union-attr]
            return False
        node = following[0]
    return False
