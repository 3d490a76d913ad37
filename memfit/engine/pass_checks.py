"""Checks in every micro-batch of a pass what the samples of a proof were too few to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memfit.engine.batch_limits import LimitChecks
from memfit.engine.branches import BranchChecks
from memfit.engine.idle_sums import IdleSums
from memfit.engine.weighting import Weighting, WeightsChanged


class PassChecks:
    """The checks that a weighting asks for: sums that were 0 in its proof still are, limits of what several samples make are
    not crossed, and all micro-batches take the same branches."""

    def __init__(self, weighting: Weighting) -> None:
        self._idle = IdleSums(weighting.idle)
        self._limits = LimitChecks(weighting.limits, sums=weighting.kind == "sum")
        self._branches = BranchChecks(weighting.branching)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Context of the forward and the loss of one micro-batch."""
        self._branches.begin()
        with self._limits.watching(), self._idle.watching():
            yield
        self._branches.end()

    def branches(self) -> AbstractContextManager[Any]:
        """Context of the user's code inside `micro_batch`, whose branches count."""
        return self._branches.watching()

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise WeightsChanged if a check fails. Reads the device once."""
        changed = self._idle.changed(device, dtype) or self._limits.changed(device, dtype)
        if changed is not None:
            raise WeightsChanged(changed, unshown=True)
        branch = self._branches.changed()
        if branch is not None:
            what = f"{branch} does not do the same in all micro-batches"
            raise WeightsChanged(what, unshown=True, differing=self._branches.differing)
