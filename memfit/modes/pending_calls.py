"""Tracks what calls of all models hold until backward: activations of whole calls, kept micro-batches of two-pass calls.

It is process-wide like memory: a script may wrap a generator and a discriminator separately. Not covered: activations of models
that are not wrapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from memfit.capture.call import Call


class Underway:
    """Calls whose backward has not begun."""

    def __init__(self) -> None:
        self._whole: list[tuple[object, weakref.ref[object]]] = []
        self._keeps: Callable[[], Call | None] = lambda: None

    @property
    def whole(self) -> int:
        """Number of calls run whole that wait for their backward."""
        self._whole = [(token, owner) for token, owner in self._whole if owner() is not None]
        return len(self._whole)

    def ran_whole(self, owner: object, outputs: list[torch.Tensor]) -> None:
        """Records the outputs of a call of `owner` run whole. It waits until one gets a gradient or `owner` has stepped."""
        waited_for = [output for output in outputs if output.requires_grad]
        token = object()
        for output in waited_for:
            output.register_hook(lambda _: self._end(token))
        if waited_for:
            self._whole.append((token, weakref.ref(owner)))

    def stepped(self, owner: object) -> None:
        """Drops the waiting calls of `owner`, whose optimizer has stepped."""
        self._whole = [(token, its) for token, its in self._whole if its() not in (None, owner)]

    def make_room(self, call: Call | None) -> None:
        """Drops activations kept by another call before `call` runs, because the plan allows for one call's at a time."""
        before = self._keeps()
        if before is not None and before is not call:
            before.kept.clear()
        self._keeps = (lambda: None) if call is None else weakref.ref(call)

    def _end(self, token: object) -> None:
        self._whole = [(its, owner) for its, owner in self._whole if its is not token]


UNDERWAY = Underway()
