"""Corrects the divisor of a masked mean on a rank whose share has no unmasked entries.

To avoid dividing by zero, scripts divide by `mask.sum().clamp(min=1)` or `mask.sum() + eps`. Beside other ranks, such a share
must count 0, not 1. This is detected if the mask multiplies the summed values. Not covered: other ways to mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memfit.capture.expression import BatchTensor, Divisor, Step, Term
from memfit.capture.lazy_views import named

_MULTIPLYING = frozenset(named("mul", "multiply", "__mul__", "__rmul__"))


def count_of(term: Term) -> Divisor:
    """Returns the term's divisor (denominator), or zero if the mask is all zero and the divisor is at most one."""
    count = term.count
    if not isinstance(count, torch.Tensor) or not isinstance(term.node, Step) or term.node.function is not torch.sum:
        return count
    for mask in _factors(term.node.arguments[0]):
        nothing = (mask.tensor == 0).all().to(count.device) & (count <= 1)
        count = torch.where(nothing, torch.zeros_like(count), count)
    return count


def _factors(node: Any) -> Iterator[BatchTensor]:
    """Yield the batch's tensors that are factors of `node`."""
    if isinstance(node, BatchTensor):
        yield node
    elif isinstance(node, Step) and node.function in _MULTIPLYING:
        for argument in node.arguments:
            yield from _factors(argument)
