"""Compares outputs that a proof found to be the same for any samples: they have to be the same in all micro-batches of a pass.

The host compares at once; on an accelerator the result is there a step later, because the device is not waited for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from memfit.capture.outputs import Outputs, name_in
from memfit.engine.batch_dependent import BatchDependent, check_same
from memfit.engine.batch_limits import LimitedCall, Limits, wanted
from memfit.engine.call_context import is_faking


class SharedOutputs:
    """The outputs of a pass that all of its micro-batches have in common, and the limits that they are on one side of."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._first: dict[int, torch.Tensor] = {}
        self._limits: dict[LimitedCall, torch.Tensor] = {}
        self._look: Limits | None = None

    def watching(self) -> AbstractContextManager[Any]:
        """The context of one micro-batch's forward."""
        self._look = None if not self._outputs.limits or is_faking() else Limits(wanted=wanted(self._outputs.limits))
        return self._look or nullcontext()

    def check(self, found: list[Any]) -> None:
        """Compare the leaves and limits of one micro-batch with those of the first. Raises BatchDependent if one differs, as
        far as the host sees."""
        for i in self._outputs.shared:
            leaf = found[i].detach()
            check_same(self._first.setdefault(i, leaf), leaf, partial(name_in, self._outputs.leaves[i].path))
        if self._look is not None:
            self._check_limits(self._look)

    def _check_limits(self, look: Limits) -> None:
        for call in self._outputs.limits:
            side, name = look.at(call), f"the side of the limit of {call.function}()"
            if side is None:
                raise BatchDependent.of(name)
            check_same(self._limits.setdefault(call, side), side, partial(str, name))
