"""What is known of one kind of training call: how it is cut, proven, weighted and planned."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from memfit.batches.cut import Layout
from memfit.batches.shapes import Shapes
from memfit.engine.accumulate import BY_SAMPLES, Weighting
from memfit.engine.composed import Composition
from memfit.planning.search import Demand
from memfit.profiling.profile import Profile
from memfit.training.call import Call
from memfit.training.learn import outputs_of
from memfit.training.outputs import Outputs
from memfit.training.planned import Planned


@dataclass
class PlannedCall(Planned):
    """A plan for one kind of call and what consumes its output."""

    demand: Demand
    """What it was made for."""
    shapes: Shapes
    """Shapes per sample that it was made for."""


@dataclass
class Kind:
    """One kind of call that was met: same nesting, dtypes and modes of its arguments."""

    layout: Layout
    """Where its samples lie."""
    shapes: Shapes
    """Shapes per sample of the largest one planned for."""
    outputs: dict[Shapes, Outputs] = field(default_factory=dict)
    """What it returns, by shapes per sample."""
    bound: Profile | None = None
    """Its profile with its own loss, or with one bounded from its output."""
    whole: int = 0
    """Samples up to which it runs whole."""
    too_many: int = sys.maxsize
    """Samples from which on it does not, as memory ran out when so many did."""
    beside: int = 0
    """Calls up to which may wait for their backward meanwhile, having run whole themselves."""
    refused: tuple[Any, ...] | None = None
    """The circumstances in which it was found not to run whole; asked again only in others."""
    proven: Outputs | None = None
    """What it returned where cutting it was proven on real samples."""
    prove_at: int = 0
    """Optimizer steps after which cutting it is proven again, on the batch that comes then."""
    alike: int = 0
    """Samples up to which its forward was seen to do the same as with few."""
    composition: Composition = field(default_factory=Composition)
    """How the state that its forward moves is composed over micro-batches."""
    writes_input: bool = False
    """Whether its forward writes into the tensors it is given."""
    weighting: Weighting = BY_SAMPLES
    """How its own loss is weighted, once inferred."""
    mute: bool = False
    """Whether the samples of its latest proof had no loss, so that nothing was inferred."""
    counted: bool = False
    """Whether the first dimension of its tensors is their samples, where only split= can cut them."""
    several: bool = False
    """Whether its output goes into several losses."""
    planned: dict[str, PlannedCall] = field(default_factory=dict)
    """Plans by what consumes the output."""

    def outputs_of(self, call: Call, shapes: Shapes) -> Outputs:
        """What the call returns, learnt where these shapes are new; joined as was proven for others, if that tells how."""
        if shapes not in self.outputs:
            learnt = outputs_of(call)
            settled = None if self.proven is None else learnt.settled_like(self.proven)
            if settled is None:
                self.proven = None
            self.outputs[shapes] = settled or learnt
        return self.outputs[shapes]
