"""Compares outputs that a proof found to be the same for any samples: they have to be the same in all micro-batches of a pass.

The host compares at once; on an accelerator the result is there a step later, because the device is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context of one micro-batch's forward, whose limits are compared with those of the first. Raises BatchDependent
        as `check` does."""
        if not self._outputs.limits or is_faking():
            yield
            return
        with Limits(wanted=wanted(self._outputs.limits)) as look:
            yield
        for call in self._outputs.limits:
            side, name = look.at(call), f"the side of the limit of {call.function}()"
            if side is None:
                raise BatchDependent.of(name)
            check_same(self._limits.setdefault(call, side), side, partial(str, name))

    def check(self, found: list[Any]) -> None:
        """Compare the leaves of one micro-batch with those of the first. Raises BatchDependent if one differs, as far as the
        host sees."""
        for i in self._outputs.shared:
            leaf = found[i].detach()
            check_same(self._first.setdefault(i, leaf), leaf, partial(name_in, self._outputs.leaves[i].path))
