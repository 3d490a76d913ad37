"""Runs a forward to see what it asks of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import nn

from memfit.engine.asked_numbers import Notes, noting
from memfit.engine.asked_tensors import TensorNotes
from memfit.engine.gradients import is_sharded
from memfit.engine.places import Place
from memfit.engine.recovery import surviving
from memfit.equivalence.proofs import comparable
from memfit.runtime.faults import is_fault, strict


def _in_tensors(places: Mapping[Hashable, Place]) -> dict[Hashable, Place]:
    return {key: place for key, place in places.items() if isinstance(place.value(), torch.Tensor)}


def asked_by(
    run: Callable[[], object], places: Mapping[Hashable, Place], model: nn.Module, device: torch.device
) -> Mapping[Hashable, Notes]:
    """Returns what the forward in `run` asks of the numbers at these places, without a trace. Nothing if it cannot run on
    numbers that take notes, memory runs out, or parameters are sharded: other ranks may not ask."""
    if is_sharded(model):
        return {}

    def noted() -> Mapping[Hashable, Notes]:
        with noting(places) as notes, comparable(model, device), torch.enable_grad():
            with TensorNotes((place.value(), notes.setdefault(key, {})) for key, place in _in_tensors(places).items()):
                run()
            return {place: dict(asked) for place, asked in notes.items()}  # (a copy: what `run` changes is undone)

    try:
        return surviving(noted, device, lambda text: {})
    except Exception as error:
        if strict() and is_fault(error):
            raise
        return {}
