"""What a masked mean counts in a process's share of which its mask leaves nothing.

Scripts divide by `mask.sum().clamp(min=1)`, or by `mask.sum() + eps`, so as not to divide by zero: beside other processes such
a share counts nothing, and not one. Seen where the mask multiplies what is added up. Not covered: other ways to leave entries
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memfit.training.expression import Cut, Divisor, Step, Term
from memfit.training.route import named

_MULTIPLYING = frozenset(named("mul", "multiply", "__mul__", "__rmul__"))


def count_of(term: Term) -> Divisor:
    """What the term divides by, and zero where its mask leaves nothing and it divides by one at most."""
    count = term.count
    if not isinstance(count, torch.Tensor) or not isinstance(term.node, Step) or term.node.function is not torch.sum:
        return count
    for mask in _factors(term.node.arguments[0]):
        nothing = (mask.tensor == 0).all().to(count.device) & (count <= 1)
        count = torch.where(nothing, torch.zeros_like(count), count)
    return count


def _factors(node: Any) -> Iterator[Cut]:
    """The tensors of the batch that `node` is a multiple of."""
    if isinstance(node, Cut):
        yield node
    elif isinstance(node, Step) and node.function in _MULTIPLYING:
        for argument in node.arguments:
            yield from _factors(argument)
