"""Compares outputs that a proof found to be the same for any samples: they have to be the same in all micro-batches of a pass.

The host compares at once; on an accelerator the result is there a step later, because the device is not waited for. For limits
of what samples make together it is waited for once at the end of a pass: the batch can still run whole then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memfit.capture.output_leaf import name_in
from memfit.capture.outputs import Outputs
from memfit.engine.batch_dependent import BatchDependent, check_same, differ
from memfit.engine.batch_limits import LimitedCall, Limits, wanted
from memfit.engine.branches import BranchChecks
from memfit.engine.call_context import is_faking
from memfit.engine.idle_sums import first_set


class SharedOutputs:
    """The outputs of a pass that all of its micro-batches have in common, and the limits that they are on one side of."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._first: dict[int, torch.Tensor] = {}
        self._limits: dict[LimitedCall, torch.Tensor] = {}
        self._unread: list[tuple[str, torch.Tensor]] = []
        self._branches = BranchChecks(outputs.branching)

    def repeat(self) -> None:
        """Begin another pass over the call. Its branches are those of the first one, however it is cut."""
        self._branches = BranchChecks(None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context of one micro-batch's forward, whose limits and branches are compared with those of the first. Raises
        BatchDependent if one differs, as far as the host sees."""
        self._branches.begin()
        if not self._outputs.limits or is_faking():
            with self._branches.watching():
                yield
            self._check_branches()
            return
        with Limits(wanted=wanted(self._outputs.limits)) as look, self._branches.watching():
            yield
        self._check_branches()
        for call in self._outputs.limits:
            side, name = look.at(call), f"the side of the limit of {call.function}()"
            if side is None:
                raise BatchDependent.of(name)
            self._compare(self._limits.setdefault(call, side), side, name)

    def _check_branches(self) -> None:
        self._branches.end()
        line = self._branches.changed()
        if line is not None:
            raise BatchDependent.of_branch(line, self._branches.differing)

    def _compare(self, first: torch.Tensor, side: torch.Tensor, name: str) -> None:
        differs = differ(first, side)
        if differs.device.type != "cpu":
            self._unread.append((name, differs))
        elif differs:
            raise BatchDependent.of(name)

    def check_limits(self) -> None:
        """Read the comparisons of limits on an accelerator, with one synchronization if there are any. Raises BatchDependent if
        one differs."""
        unread, self._unread = self._unread, []
        name = first_set(unread, unread[0][1].device, torch.float32) if unread else None
        if name is not None:
            raise BatchDependent.of(name)

    def check(self, found: list[Any]) -> None:
        """Compare the leaves of one micro-batch with those of the first. Raises BatchDependent if one differs, as far as the
        host sees."""
        for i in self._outputs.shared:
            leaf = found[i].detach()
            check_same(self._first.setdefault(i, leaf), leaf, partial(name_in, self._outputs.leaves[i].path))
