"""Finds state that micro-batches move although no proof has seen it move, in scripts that branch on values of the batch:
`if rare.any(): self.seen += 1`. It is put back if the pass fails. What any micro-batch moves, the first one has to move and the
others have to leave: a flag, a table that is made when it is first needed.

Not covered: state that `CallAttributes` does not find; writes through `.data`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit._errors import Refused
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.call_attributes import Attributes
from memfit.engine.modules import modules_of
from memfit.engine.places import Place, TensorPlace
from memfit.engine.version_checks import Keys, keys_of_values, named

LARGE = 16 << 20
"""Bytes up to which a tensor is copied."""
Moves = list[tuple[Place, Any]]
"""Places, each with its value before."""


class UnseenMoves:
    """What of these `attributes` of a model moves from now on, but at the places that are `known` to move. (Batch norms are
    accounted for elsewhere.)"""

    def __init__(self, attributes: Attributes, model: nn.Module, known: Keys) -> None:
        self._held, self._known = attributes.now(), known
        norms = (module for module in modules_of(model) if isinstance(module, nn.modules.batchnorm._BatchNorm))
        own = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        tensors = [each for each in self._held.contents.versions if id(each[0]) not in own and not each[0].requires_grad]
        tensors = [each for each in tensors if known.isdisjoint(keys_of_values(each[0], each[0]))]
        self._tensors = [(t, version, t.detach().clone() if _bytes_of(t) <= LARGE else None) for t, version in tensors]
        self._found: dict[tuple[Any, ...], Any] | None = None
        self._moved_by_forwards: set[tuple[Any, ...]] = set()
        self._is_first = True

    def before_forward(self) -> None:
        """Begin a micro-batch's forward."""
        self._found = {place.key: _state_of(place) for place, _ in self._moves()}

    def after_forward(self) -> None:
        """End a micro-batch's forward. Raises BatchDependent if it is not the first one and moved something."""
        moved, is_first = self._moved_since(), self._is_first
        self._moved_by_forwards |= {place.key for place in moved}
        self._found, self._is_first = None, False
        if moved and not is_first:
            raise BatchDependent.of(moved[0].label)

    def of_forwards(self) -> Moves:
        """Return what forwards have moved and can be put back. (What backward has moved is not.)"""
        return [move for move in self._of_forwards() if not _has_no_copy(*move)]

    def undo(self) -> None:
        """Put back what forwards have moved, also one that failed. Raises Refused if there is no copy of it."""
        self._moved_by_forwards |= {place.key for place in self._moved_since()}
        for place, before in self._of_forwards():
            if _has_no_copy(place, before):
                raise Refused(
                    "running a call of the model in micro-batches",
                    found=f"its forward writes {place.label} on some batches only",
                    next_move="write it outside the forward, or give it a budget in which the batch runs whole",
                )
            place.put(before)

    def _of_forwards(self) -> Moves:
        return [move for move in self._moves() if move[0].key in self._moved_by_forwards]

    def _moves(self) -> Moves:
        written = [(TensorPlace(t, named(t)), copy) for t, version, copy in self._tensors if t._version != version]
        return [*(move for move in self._held.written() if move[0].key not in self._known), *written]

    def _moved_since(self) -> list[Place]:
        """What moved since the forward began, which runs now."""
        found = self._found
        if found is None:
            return []
        return [place for place, _ in self._moves() if not _is_left(found.get(place.key), _state_of(place))]


def _has_no_copy(place: Place, before: Any) -> bool:
    return before is None and isinstance(place, TensorPlace)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state_of(place: Place) -> Any:
    """Return what tells a place's state from an earlier one."""
    return [place.tensor._version] if isinstance(place, TensorPlace) else [place.value()]


def _is_left(before: list[Any] | None, now: list[Any]) -> bool:
    if before is None:
        return False
    (one,), (other,) = before, now
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other))
    return one is other or (type(one) is type(other) is int and one == other)
