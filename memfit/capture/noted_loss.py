"""The value of a model's own loss in a pass that trains on another one, for a script that reads it later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from memfit.batches.weights import Count
from memfit.capture.call import Call
from memfit.engine.accumulate import Pass
from memfit.engine.compose_state import Composition
from memfit.engine.known_means import standing_in
from memfit.engine.staged import Staging
from memfit.engine.weighting import CountOf, Weighting, WeightsChanged


class NotedLoss:
    """Weights the model's own loss of each micro-batch as a pass for that loss would. It is the work of such a pass."""

    def __init__(self, call: Call, weighting: Weighting, staging: Staging) -> None:
        self.samples, self.device, self.composition = call.samples, call.device, Composition()
        self._call, self._leaves = call, list[Any]()
        self._pass, self._by_name = Pass(self, staging, weighting, 1.0), weighting.by_name
        self._sizes, self._known = list[int](), True

    def run(self, arguments: Any, samples: int) -> list[Any]:
        """Run the forward and return the leaves of its output."""
        self._sizes.append(samples)
        try:
            with standing_in() if self._by_name else nullcontext():
                self._pass.note(arguments, samples)
        except WeightsChanged:
            self._known = False
        if not self._leaves:  # its count failed before the forward
            self.loss(arguments)
        leaves, self._leaves = self._leaves, []
        return leaves

    def value(self) -> torch.Tensor | None:
        """Return the value for all micro-batches; None if its weighting does not hold for this batch."""
        try:
            self._pass.check_rivals(self._sizes)
            self._pass.check_divisors()
        except WeightsChanged:
            return None
        return self._pass.total(()).value.detach() if self._known else None

    def inputs(self, start: int, stop: int, count: CountOf | None) -> tuple[Any, Count | None]:
        raise AssertionError("unreachable: the pass for the other loss cuts the batch")

    def counted(self, start: int, stop: int, count: CountOf) -> Count | None:
        return None

    def forward(self, inputs: Any) -> Any:
        return inputs

    def loss(self, outputs: Any) -> torch.Tensor:
        self._leaves = self._call.checked(outputs)
        assert self._call.outputs.loss is not None
        return self._leaves[self._call.outputs.loss]

    def extra_receivers(self) -> Sequence[torch.Tensor]:
        return ()

    def extra_gradients(self) -> list[torch.Tensor | None]:
        return []
