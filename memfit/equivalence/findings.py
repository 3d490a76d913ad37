"""What the proofs of one kind of training call have shown together: samples of one proof may not do what those of another do.

Not covered: attributes, list items and dictionary entries that the samples of the latest proof did not move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.engine.branches import Act, Branching, MovedPlace
from memfit.engine.compose_state import Added, Composition, Last, SumOfParts
from memfit.engine.places import TensorPlace
from memfit.equivalence.proof_samples import Apart, Marks, act_marks, drawn
from memfit.tracing.sandbox import Traces


@dataclass
class Findings:
    """What proofs have shown, and what the samples of the next one are to show."""

    composition: Composition = field(default_factory=Composition)
    """How the state that a call moves is composed over micro-batches."""
    branching: Branching | None = None
    """What is known of branches on values of the batch, if there may be some."""
    apart: Apart = field(default_factory=Apart)
    """The leaves that say to which class or group samples belong, of which no proof has had two in both parts."""
    differing: Collection[Act] = ()
    """What the samples of the next proof are to differ in, if possible."""

    def add(self, composition: Composition, branching: Branching | None, model: nn.Module) -> str | None:
        """Join what one more proof shows. Returns the label of a place that is composed otherwise than before, or None. (Keeps
        nothing of the proof alive.)"""
        other = _contradicted(composition, self.composition)
        self.composition = _with_earlier(composition, self.composition, model)
        if self.branching or branching:
            self.branching = (branching or Branching()).joined(self.branching)
        return other

    def allows(self, act: Act) -> bool:
        """Whether only some micro-batches may do this."""
        if isinstance(act, MovedPlace):
            return act.key in self.composition.keys - self.composition.steady
        return self.branching is not None and self.branching.allows(act)

    def has_new_pairs(self, tree: Any, samples: int) -> bool:
        """Whether a batch has samples of one class or group, where no proof has had some in both parts. Entries on a device are
        read only if state depends on the order of samples, as a table of them: reading waits for the device."""
        return bool(self.apart.left) and self.apart.pairs_in(tree, samples, waits=self.composition.in_sequence)

    def marks_of(
        self, run: Callable[[], Any], aside: Callable[[], AbstractContextManager[Traces]], device: torch.device
    ) -> Callable[[Callable[[], Any]], Marks]:
        """Returns what tells which of `differing` one sample does, from what runs it. Calls that depend on random numbers, as
        `run` shows for some samples, are free from now on. `aside` gives contexts that leave no trace."""
        self.branching = drawn(run, aside, self.differing, device).joined(self.branching)
        return partial(act_marks, differing=self.differing, aside=aside)


def _with_earlier(composition: Composition, earlier: Composition, model: nn.Module) -> Composition:
    """Add the parameters and buffers that forwards move on some batches only: those that `earlier` proofs saw move."""
    there = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers()) if t.layout is torch.strided}
    known = composition.keys
    tensors = [place for place in earlier.moved if isinstance(place, TensorPlace)]
    more = {place.key: place for place in tensors if place.key not in known and place.key[0] in there}
    slots = [slot for slot in earlier.slots if slot.place.key in more]
    draws = composition.draws or (bool(more) and earlier.draws)
    unsteady = earlier.keys - earlier.steady
    steady = (composition.steady - unsteady) | (earlier.steady & more.keys())
    return Composition((*composition.slots, *slots), (*composition.moved, *more.values()), draws=draws, steady=steady)


def _contradicted(composition: Composition, earlier: Composition) -> str | None:
    """Return the label of a place that an earlier proof composed by a rule that this one rules out: parts that leave the whole
    batch's value in one, and add to it in the other, do so by values of their samples."""
    before = {slot.place.key: slot.rule for slot in earlier.slots}
    for slot in composition.slots:
        rules = {type(slot.rule), type(before.get(slot.place.key, slot.rule))}
        if Last in rules and not rules.isdisjoint((Added, SumOfParts)):
            return slot.place.label
    return None
