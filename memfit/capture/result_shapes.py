"""What the result of an operation on lazy tensors looks like, found on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.capture.expression import BatchTensor, Node, all_nodes, look_of
from memfit.capture.lazy_tensor import LazyTensor
from memfit.capture.sample_range import SampleRange

LOOKS = 512
"""Maximum number of operations whose result is cached."""


class ResultShapes:
    """Tells the shape and dtype of results."""

    def __init__(self) -> None:
        self._shapes: dict[Any, Any] = {}

    def like_after(self, following: Node, parents: Sequence[LazyTensor], samples: int) -> torch.Tensor | None:
        """Return a fake tensor like the result of an operation on stand-ins, or None if unknown."""
        key = look_of(following, {id(p.node): (tuple(p.shape), p.dtype, p.device) for p in parents}, samples)
        if key not in self._shapes:
            if len(self._shapes) >= LOOKS:
                self._shapes.clear()
            self._shapes[key] = _result_of(following, parents, samples)
        return self._shapes[key]


def _result_of(following: Node, parents: Sequence[LazyTensor], samples: int) -> torch.Tensor | None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    known = {id(parent.node): parent for parent in parents}
    try:
        with FakeTensorMode():
            part = SampleRange({}, 0, samples)
            for node in all_nodes(following):
                like = known.get(id(node)) if not isinstance(node, BatchTensor) else node.tensor
                if like is not None:
                    part.put(node, torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device))
            return part.value(following)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # the real operation raises its own error
