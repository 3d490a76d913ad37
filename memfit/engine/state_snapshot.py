"""Tells what changed in all that some objects reach, and which objects that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memfit.engine.places import Place, TensorPlace
from memfit.engine.state_changes import holds
from memfit.engine.undo_state import UndoState


class StateSnapshot:
    """A snapshot of all that `roots` reach. `copy_of` returns a copy of a tensor, or None to leave it out, as for parameters.
    Iterators become rewindable for good."""

    def __init__(self, roots: Iterable[Any], copy_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        found = UndoState({})
        found.look(roots)
        self._watches = found.watches()
        tensors = [(tensor, copy) for tensor in found.small_tensors() if (copy := copy_of(tensor)) is not None]
        self._tensors = [(tensor, copy, _version_of(tensor)) for tensor, copy in tensors]
        found.undo(iterators=False)

    def moved(self) -> list[tuple[Place, Any]]:
        """Return (place, old value) of all that changed, or was written: a slow copy of a net may be equal to it at first."""
        # compares values, too, as writes to `.data` do not change the version
        written = [
            (TensorPlace(tensor, "a tensor"), copy)
            for tensor, copy, version in self._tensors
            if _version_of(tensor) != version or not holds(tensor, copy)
        ]
        return [*(move for watch in self._watches for move in watch()), *written]


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def reached_from(roots: Iterable[Any]) -> set[int]:
    """Return the ids of all objects that planning would visit from these roots, and of their attribute dictionaries."""
    found = UndoState({})
    found.look(roots)
    objects = found.visited()
    found.undo()
    return {*map(id, objects), *(id(each.__dict__) for each in objects if hasattr(each, "__dict__"))}
