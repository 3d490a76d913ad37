"""How far a prediction for a GPU that is not here may be off: bounds calibrated on peaks that others measured.

Split conformal prediction (Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005) on the relative residuals of
half of the models of `benchmarks/prediction_timm.py`, judged on the other half: no model is in both. Steps whose arithmetic
lies in convolutions have an interval of their own, as cuDNN chooses its workspaces while it runs. Not covered: other cards and
versions than those rows are of; the context, which is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.profiling.timeline import Timeline


@dataclass(frozen=True)
class Interval:
    """Bounds as shares of the bytes that are predicted to be reserved."""

    lower: float
    """By how much less may be reserved."""
    upper: float
    """By how much more may be reserved."""
    covered: float
    """The share of the judged rows that stayed below the upper bound."""


PLAIN = Interval(lower=0.03, upper=0.13, covered=0.95)
"""Matrix products and attention: 79 rows judged. Half of them are predicted within 2 %; what is above comes from two models
whose attention has five dimensions."""
CONVOLUTIONS = Interval(lower=0.06, upper=0.143, covered=0.97)
"""Steps with convolutions: 276 rows judged. What is above comes from `cudnn.benchmark`, which tries workspaces of several GiB
where there is room for them, and does without where there is none."""
CONVOLUTIONAL = 0.1
"""Share of a step's arithmetic from which on it counts as convolutional (patches of a vision transformer: 0.01)."""


def interval_of(timeline: Timeline) -> Interval:
    """The interval for predictions of a step; the wider one where its arithmetic was not counted."""
    operations = timeline.operations
    if operations is None or not operations.flops_at(1).sum():
        return CONVOLUTIONS
    names = [name for name, _ in operations.kinds]
    flops = operations.flops_at(1)
    inside = sum(float(flops[operations.kind == i].sum()) for i, name in enumerate(names) if name.startswith("convolution"))
    return CONVOLUTIONS if inside > CONVOLUTIONAL * float(flops.sum()) else PLAIN
