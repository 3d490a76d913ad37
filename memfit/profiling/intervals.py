"""Error bounds of memory predictions, calibrated on measured peaks.

Bounds for GPUs that are not present use peaks that others measured; those for the CPU use `benchmarks/prediction_cpu.py`. Split
conformal prediction (Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005) takes the errors for half of the
models of `benchmarks/prediction_timm.py` and is judged on the other half: no model is in both (`benchmarks/timm_bounds.py`).
Convolutional steps have their own interval, because cuDNN chooses its workspaces at run time. On the CPU the error is in bytes,
regardless of the step's size; there the split is by model family. Not covered: cards and versions that these rows lack; the
context, which is counted separately; a C library that keeps freed memory (`allocator.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit._units import MiB
from memfit.profiling.timeline import Timeline


@dataclass(frozen=True)
class Interval:
    """Bounds as shares of the predicted bytes, and in bytes. (On GPUs, a floor in bytes did not narrow any interval.)"""

    lower: float
    """How much less may be reserved, as a share of the prediction."""
    upper: float
    """How much more may be reserved, as a share of the prediction."""
    covered: float
    """Share of the judged rows below the upper bound."""
    above: float
    """Share of the judged rows above the lower bound."""
    lower_bytes: int = 0
    """How much less may be held, regardless of the prediction."""
    upper_bytes: int = 0
    """How much more may be held, regardless of the prediction."""


PLAIN = Interval(lower=0.153, upper=0.073, covered=0.945, above=0.959)
"""Matrix products and attention: calibrated on 82 rows for 95 %, judged on 73. Covering 98.6 % of these takes 0.123."""
CONVOLUTIONS = Interval(lower=0.313, upper=0.129, covered=0.954, above=1.0)
"""Steps with convolutions: calibrated on 286 rows for 95 %, judged on 281. Covering 97.9 % of these takes 0.608."""
GIVEN_BACK = Interval(lower=0.0, upper=0.0, covered=0.99, above=0.99, lower_bytes=2 * MiB, upper_bytes=4 * MiB)
"""The CPU, where freed memory goes back at once: 338 rows of 10 model families. For 99 %, one half of them gave 3.7 MiB above
and 1.8 below, the other 4.0 and 2.6. These covered 99 % and all of the respective other half."""
CONVOLUTIONAL = 0.1
"""A step with more than this share of its FLOPs in convolutions is convolutional (patches of a vision transformer: 0.01)."""


def interval_of(timeline: Timeline) -> Interval:
    """Returns the interval for predictions of a step; the wider one if its FLOPs were not counted."""
    operations = timeline.operations
    if operations is None or not operations.flops_at(1).sum():
        return CONVOLUTIONS
    names = [name for name, _ in operations.kinds]
    flops = operations.flops_at(1)
    inside = sum(float(flops[operations.kind == i].sum()) for i, name in enumerate(names) if name.startswith("convolution"))
    return CONVOLUTIONS if inside > CONVOLUTIONAL * float(flops.sum()) else PLAIN
