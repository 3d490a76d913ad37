"""Compares outputs that a proof found to be the same for any samples: they have to be the same in all micro-batches of a pass.

The host compares at once; on an accelerator the result is there a step later, because the device is not waited for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfit.capture.outputs import Outputs, name_in
from memfit.engine.batch_dependent import check_same


class SharedOutputs:
    """The outputs of a pass that all of its micro-batches have in common."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._first: dict[int, torch.Tensor] = {}

    def check(self, found: list[Any]) -> None:
        """Compare the leaves of one micro-batch with those of the first. Raises BatchDependent if one differs, as far as the
        host sees."""
        for i in self._outputs.shared:
            leaf = found[i].detach()
            check_same(self._first.setdefault(i, leaf), leaf, partial(name_in, self._outputs.leaves[i].path))
