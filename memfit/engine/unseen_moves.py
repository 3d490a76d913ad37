"""Finds state that micro-batches move although no proof has seen it move, in scripts that branch on values of the batch:
`if rare.any(): self.seen += 1`. It is put back, and the pass fails. A proof on samples that move it may show how parts
compose it.

Not covered: state that `CallAttributes` does not find; writes through `.data` of large tensors, or on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from memfit._errors import Refused
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.call_attributes import Attributes
from memfit.engine.modules import modules_of
from memfit.engine.place_marks import is_at, is_tensor_at, mark_of, mark_of_tensor
from memfit.engine.places import ArrayPlace, Place, TensorPlace
from memfit.engine.version_checks import Keys, keys_of_values, named

LARGE = 16 << 20
"""Bytes up to which a tensor is copied, and all arrays together."""
Moves = list[tuple[Place, Any]]
"""Places, each with its value before."""


class UnseenMoves:
    """What of these `attributes` of a model moves from now on, but at the places that are `known` to move. Of those, all
    micro-batches or none have to move each `steady` one, which all parts of a proof moved. (Batch norms are accounted for
    elsewhere.)"""

    def __init__(self, attributes: Attributes, model: nn.Module, known: Keys, steady: Keys) -> None:
        self._held, self._steady, self._known = attributes.now(), steady, known - steady
        norms = (module for module in modules_of(model) if isinstance(module, nn.modules.batchnorm._BatchNorm))
        own = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        tensors = [t for t, _ in self._held.contents.versions if id(t) not in own and not t.requires_grad]
        tensors = [t for t in tensors if self._known.isdisjoint(keys_of_values(t, t))]
        self._tensors = [(t, mark_of_tensor(t), t.detach().clone() if self._is_copied(t) else None) for t in tensors]
        arrays = [ArrayPlace(array, "an array") for array in _up_to(LARGE, self._held.contents.arrays.values())]
        self._arrays = [(place, place.value()) for place in arrays if place.key not in self._known]
        self._found: dict[tuple[Any, ...], tuple[Place, Any]] | None = None
        self._moved: list[dict[tuple[Any, ...], str]] = []

    def before_forward(self) -> None:
        """Begin a micro-batch's forward."""
        self._found = {place.key: (place, mark_of(place)) for place, _ in self._moves()}

    def after_forward(self) -> None:
        """End a micro-batch's forward."""
        self._moved.append(self._moved_since())
        self._found = None

    def check(self) -> None:
        """Raise BatchDependent if there are several micro-batches, and some of them move what no proof has seen some move."""
        if len(self._moved) < 2:
            return
        moved: dict[tuple[Any, ...], str] = {}
        for look in self._moved:
            moved |= look
        in_all = frozenset(self._steady).intersection(*self._moved)
        differing = {key: label for key, label in moved.items() if key not in in_all}
        if differing:
            raise BatchDependent.of_moves(next(iter(differing.values())), differing)

    def of_forwards(self) -> Moves:
        """Return what forwards have moved and can be put back. (What backward has moved is not.)"""
        return [move for move in self._of_forwards() if not _has_no_copy(*move)]

    def undo(self) -> None:
        """Put back what forwards have moved, also one that failed. Raises Refused if there is no copy of it."""
        self._moved.append(self._moved_since())
        for place, before in self._of_forwards():
            if _has_no_copy(place, before):
                raise Refused(
                    "running a call of the model in micro-batches",
                    found=f"its forward writes {place.label} on some batches only",
                    next_move="write it outside the forward, or give it a budget in which the batch runs whole",
                )
            place.put(before)

    def _is_copied(self, tensor: torch.Tensor) -> bool:
        is_steady = not self._steady.isdisjoint(keys_of_values(tensor, tensor))
        return not is_steady and tensor.numel() * tensor.element_size() <= LARGE

    def _of_forwards(self) -> Moves:
        """What is put back here: the places that are steady are composed."""
        moved = set[tuple[Any, ...]]().union(*self._moved) - self._steady
        return [move for move in self._moves() if move[0].key in moved]

    def _moves(self) -> Moves:
        """Return the places that moved since the pass began, but those that are known to, each with its value before."""
        written = [(TensorPlace(t, named(t)), copy) for t, mark, copy in self._tensors if not is_tensor_at(t, mark)]
        arrays = [(place, before) for place, before in self._arrays if not is_at(place, before)]
        return [*(move for move in self._held.written() if move[0].key not in self._known), *written, *arrays]

    def _moved_since(self) -> dict[tuple[Any, ...], str]:
        """What moved since the forward began, which runs now: keys and labels."""
        found = self._found
        if found is None:
            return {}
        now = {place.key: place for place, _ in self._moves()}
        back = {key: place.label for key, (place, _) in found.items() if key not in now}  # as it was when the pass began
        moved = {key: place for key, place in now.items() if key not in found or not _is_left(place, found[key][1])}
        return back | {key: place.label for key, place in moved.items()}


def _up_to(most: int, arrays: Iterable[Any]) -> list[Any]:
    """Return the first arrays of this many bytes in all, without those of Python objects."""
    plain = [array for array in arrays if not array.dtype.hasobject]
    return [array for array, size in zip(plain, accumulate(array.nbytes for array in plain)) if size <= most]


def _has_no_copy(place: Place, before: Any) -> bool:
    return before is None and isinstance(place, TensorPlace)


def _is_left(place: Place, before: Any) -> bool:
    """Whether a place is as it was when its mark was made, or is a number again that it was."""
    return is_at(place, before) or (type(before) is int and type(now := place.value()) is int and before == now)
