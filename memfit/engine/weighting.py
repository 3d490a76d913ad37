"""How micro-batches are weighted: by samples, by counts of the batch, or by the denominator of a known mean."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from memfit.batches.weights import Count
from memfit.engine.batch_limits import LimitedCall
from memfit.engine.branches import Act, Branching
from memfit.engine.divisors import How
from memfit.engine.idle_sums import Idle

CountOf = Callable[[Any], Count]


@dataclass(frozen=True)
class Weighting:
    """How the losses of micro-batches are weighted to give the loss of the full batch (its reduction)."""

    kind: Literal["samples", "sum", "term", "count", "share"]
    """samples: by the number of samples. sum: each weighs 1. term: by the denominator of the one known mean that the loss is.
    count: by `count` of the micro-batch. share: each weighs 1, and ranks weigh by their samples."""
    label: str
    """Description for the report."""
    count: CountOf | None = None
    """For "count": returns the weight of a micro-batch."""
    watch: bool = False
    """Whether known means stand beside other terms. Their denominators must then be proportional to the samples, which is
    checked before the gradients are handed over."""
    by_name: bool = False
    """Whether all its known means are called as attributes of torch.nn.functional; no other call is intercepted then."""
    told: bool = False
    """Whether the work reports the known mean it computes (`terms.told`); no call is intercepted then."""
    inferred: bool = False
    """For "count": whether the count was inferred, not given by the user."""
    rivals: tuple[CountOf, ...] = ()
    """For "samples" and "count": other counts that the proof could not tell apart from the weights. A batch where they are not
    proportional to the weights needs a new proof."""
    sums: bool = False
    """Whether adding the losses is correct, too. Parts with zero loss cannot tell the two apart."""
    divided: tuple[How, ...] | None = None
    """How each divisor in the loss depends on the samples. Divisors that add up must stay proportional to the weights. None:
    not checked."""
    doubt: str | None = None
    """Why it may hold for the proof's samples but not for others. None if nothing suggests that."""
    idle: tuple[Idle, ...] = ()
    """Sums over samples that were 0 in the proof, which did not show how they add up. They must stay 0."""
    limits: tuple[LimitedCall, ...] = ()
    """Limits of sums over samples. All micro-batches must be on the same side."""
    branching: Branching | None = None
    """What is known of branches on values of the batch, if there may be some. All micro-batches must take the same."""
    alike: bool = False
    """Whether all parts of the proof gave the loss and the gradients of the whole."""

BY_SAMPLES = Weighting("samples", "by samples")
BY_TERM = Weighting("term", "by its mean's denominator")
BY_TOLD_TERM = Weighting("term", "by its mean's denominator", told=True)


class WeightsChanged(Exception):
    """The loss no longer has the form its weighting was proven for. No gradients were handed over. `unshown`: a few samples
    would not show it. `differing`: what only some micro-batches did."""

    def __init__(self, what: str, *, unshown: bool = False, differing: Collection[Act] = ()) -> None:
        super().__init__(what)
        self.unshown, self.differing = unshown, frozenset(differing)
