"""Plans for a GPU that is not present: memory comes from the catalogue, seconds are modeled.

Not covered: models that can only be profiled by running them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import UsageError
from memfit.autotune.measure_sizes import Measurer
from memfit.autotune.memory import Memory
from memfit.autotune.task import Task
from memfit.engine.staged import Staging
from memfit.hardware.budget import Budget
from memfit.hardware.catalogue import Card
from memfit.kernels.target import Target
from memfit.profiling.intervals import interval_of
from memfit.profiling.profile import Profile
from memfit.profiling.roofline import modelled
from memfit.tracing.failures import TraceFailed

NEAREST = (9, 0)
"""Compute capability whose kernels stand in for GPUs without one: AMD's data center cards run flash attention and keep
cuBLAS-like workspaces of Hopper's size."""


def target_of(card: Card | None) -> Target | None:
    """Return what kernel selection depends on."""
    return None if card is None else Target(card.capability or NEAREST)


def on_card(profile: Profile, card: Card) -> Profile:
    """Return a profile with this card's modeled seconds; it may be traced for another card that selects the same kernels."""
    interval = None if profile.timeline is None else interval_of(profile.timeline)
    found = modelled(replace(profile, capability=card.capability or NEAREST, timings=(), interval=interval), card)
    how = "modelled from operations and data sheets" if found.timings else "unknown"
    others = tuple(note for note in profile.notes if not note.startswith((_PLANNED_FOR, _EMULATED)))
    own = f"{_PLANNED_FOR} {card.title}, which is not here: seconds are {how}"
    return replace(found, notes=(*others, own, *_emulated(profile, card)))


def _emulated(profile: Profile, card: Card) -> tuple[str, ...]:
    """Return the note on bfloat16 for an NVIDIA GPU without hardware support: torch computes in it all the same."""
    if profile.precision != "bfloat16" or card.capability is None or card.capability >= (8, 0):
        return ()
    better = "the card is made for float16" if card.capability >= (7, 0) else "float32 is faster"
    return (f"{_EMULATED} {card.title}, which has no units for it: it works, slowly; {better}",)


_EMULATED = "bfloat16 is emulated on"
_PLANNED_FOR = "planned for"


def is_elsewhere(notes: Sequence[str]) -> bool:
    """Return whether a profile or a plan with these notes is for a card that is not present."""
    return any(note.startswith(_PLANNED_FOR) and "not here" in note for note in notes)


class CardMemory(Memory):
    """The memory of a card that nothing uses."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device, budget: Budget) -> None:
        super().__init__(model, optimizer, device, budget)
        self.reserved, self._given = False, budget

    def budget(self) -> Budget:
        """Return the given budget, whatever is held here."""
        return self._given


class CardMeasurer(Measurer):
    """Models timings instead of measuring them."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, memory: Memory, staging: Staging, card: Card
    ) -> None:
        super().__init__(model, optimizer, device, memory, staging)
        self._card = card

    def timed(
        self, task: Task, profile: Profile, *, beside: Profile | None = None, thoroughly: bool = False
    ) -> Profile:
        """Return the profile with modeled seconds."""
        return on_card(profile, self._card)


def not_measurable(card: Card | None, failed: TraceFailed) -> UsageError:
    """Return the error for a model that can only be profiled by running it, but cannot be run."""
    if card is None:
        return UsageError(
            "a profile of a model on the meta device",
            found=f"it cannot be traced, and has no values to run with; tracing failed: {failed.reason}",
            next_move="give it values (model.to_empty(device='cpu') does), so that small micro-batches can be measured",
        )
    return UsageError(
        f"a profile for {card.title}",
        found=f"the model cannot be traced, and nothing can be measured on a card that is not here; tracing failed: "
        f"{failed.reason}",
        next_move="run it on that card, where memfit measures small micro-batches, or make it traceable",
    )
