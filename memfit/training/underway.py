"""What training calls hold until their backward comes, over all models of the process: whole ones their activations, those in
two passes the micro-batches that were kept.

Process-wide, as memory is: a script may wrap its generator and its discriminator one by one. Not covered: activations of models
that are not wrapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from memfit.training.call import Call


class Underway:
    """Calls whose backward has not begun yet."""

    def __init__(self) -> None:
        self._whole: list[tuple[object, weakref.ref[object]]] = []
        self._keeps: Callable[[], Call | None] = lambda: None

    @property
    def whole(self) -> int:
        """How many calls that ran whole wait for their backward."""
        self._whole = [(token, owner) for token, owner in self._whole if owner() is not None]
        return len(self._whole)

    def ran_whole(self, owner: object, outputs: list[torch.Tensor]) -> None:
        """A call of `owner` ran whole and returned this; it waits until a gradient of it arrives, or `owner` has stepped."""
        waited_for = [output for output in outputs if output.requires_grad]
        token = object()
        for output in waited_for:
            output.register_hook(lambda _: self._end(token))
        if waited_for:
            self._whole.append((token, weakref.ref(owner)))

    def stepped(self, owner: object) -> None:
        """The optimizer of `owner` stepped: what waited for a backward of its calls does so no longer."""
        self._whole = [(token, its) for token, its in self._whole if its() not in (None, owner)]

    def make_room(self, call: Call | None) -> None:
        """`call` is to run: activations that another one kept go, as what fits was planned for one at a time."""
        before = self._keeps()
        if before is not None and before is not call:
            before.kept.clear()
        self._keeps = (lambda: None) if call is None else weakref.ref(call)

    def _end(self, token: object) -> None:
        self._whole = [(its, owner) for its, owner in self._whole if its is not token]


UNDERWAY = Underway()
