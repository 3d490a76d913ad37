"""What is known of one kind of training call: how it is cut, proven, weighted and planned."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from memfit.autotune.active_plan import Planned
from memfit.batches.cut import Layout
from memfit.batches.shapes import Shapes, no_larger
from memfit.capture.call import Call
from memfit.capture.infer_layout import outputs_of
from memfit.capture.outputs import Outputs
from memfit.engine.compose_state import Composition
from memfit.engine.weighting import BY_SAMPLES, Weighting
from memfit.equivalence.findings import Findings
from memfit.equivalence.weighting_codes import agree
from memfit.modes.pending_calls import UNDERWAY
from memfit.planning.search import Demand
from memfit.profiling.profile import Profile


@dataclass
class PlannedCall(Planned):
    """A plan for one kind of call and the consumer of its output."""

    demand: Demand
    """The demand it was made for."""
    shapes: Shapes
    """The shapes per sample it was made for."""


@dataclass
class CallKind:
    """One kind of call, told apart by call signature: nesting, dtypes and modes of its arguments."""

    layout: Layout
    """The sample axes of its arguments."""
    shapes: Shapes
    """The largest shapes per sample that were planned for."""
    outputs: dict[Shapes, Outputs] = field(default_factory=dict)
    """Its outputs, by shapes per sample."""
    bound: Profile | None = None
    """Its profile with its own loss, or with a bound on the loss from its output."""
    whole: int = 0
    """Samples up to which it runs whole."""
    too_many: int = sys.maxsize
    """Samples from which it no longer runs whole, because that many ran out of memory."""
    beside: int = 0
    """Most other whole calls that may wait for their backward while it runs whole."""
    refused: tuple[Any, ...] | None = None
    """The circumstances in which it did not run whole; checked again only in others."""
    proven: Outputs | None = None
    """Its outputs as the proof on real samples found them."""
    prove_at: int = 0
    """Optimizer steps after which the next batch proves cutting again."""
    findings: Findings = field(default_factory=Findings)
    """What all its proofs show of its state and its branches."""
    alike: int = 0
    """Samples up to which its forward was seen to do the same as with few."""
    writes_input: bool = False
    """Whether its forward writes into its input tensors."""
    weighting: Weighting = BY_SAMPLES
    """How its own loss is weighted, once inferred."""
    mute: bool = False
    """Whether the samples of its latest proof had no loss, so that nothing was inferred."""
    counted: bool = False
    """With split=: whether the first dimension of its tensors counts the samples."""
    several: bool = False
    """Whether its output goes into several losses."""
    planned: dict[str, PlannedCall] = field(default_factory=dict)
    """Plans, by consumer of the output."""

    @property
    def composition(self) -> Composition:
        """How the state that its forward moves is composed over micro-batches."""
        return self.findings.composition

    def is_known_whole(self, samples: int, shapes: Shapes) -> bool:
        """Whether such a call is known to run whole beside the whole calls that wait for their backward."""
        return samples <= self.whole and UNDERWAY.whole <= self.beside and no_larger(shapes, self.shapes)

    def agrees_with(self, other: CallKind, shapes: Shapes) -> bool:
        """Whether a proof on a call of these shapes found the same of `other`."""
        same = self.outputs[shapes].looks_like(other.outputs[shapes]) and self.writes_input == other.writes_input
        same = same and not other.mute and agree(self.weighting, other.weighting)
        return same and self.composition.agrees_with(other.composition)

    def outputs_of(self, call: Call, shapes: Shapes) -> Outputs:
        """Return the call's outputs, learned if these shapes are new, and joined as proven for other shapes, if possible."""
        if shapes not in self.outputs:
            learnt = outputs_of(call)
            settled = None if self.proven is None else learnt.settled_like(self.proven)
            if settled is None:
                self.proven = None
            self.outputs[shapes] = settled or learnt
        return self.outputs[shapes]
