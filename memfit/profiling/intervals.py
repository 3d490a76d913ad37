"""How far a prediction may be off: bounds calibrated on measured peaks.

For GPUs that are not here on peaks that others measured, for the CPU on those of `benchmarks/prediction_cpu.py`.
Split conformal prediction (Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005) on what was missing in half
of the models of `benchmarks/prediction_timm.py`, judged on the other half: no model is in both (`benchmarks/timm_bounds.py`).
Steps whose arithmetic lies in convolutions have an interval of their own, as cuDNN chooses its workspaces while it runs. On the
CPU what is missing is bytes, however large the step: families of models are split there. Not covered: other cards and versions
than those rows are of; the context, which is counted apart; a C library that keeps what was freed (`allocator.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit._units import MiB
from memfit.profiling.timeline import Timeline


@dataclass(frozen=True)
class Interval:
    """Bounds as shares of the bytes that are predicted to be held, and as bytes. (On GPUs a floor in bytes narrowed none.)"""

    lower: float
    """By how much less may be reserved."""
    upper: float
    """By how much more may be reserved."""
    covered: float
    """The share of the judged rows that stayed below the upper bound."""
    above: float
    """The share of the judged rows that stayed above the lower bound."""
    lower_bytes: int = 0
    """By how much less may be held, whatever is predicted."""
    upper_bytes: int = 0
    """By how much more may be held, whatever is predicted."""


PLAIN = Interval(lower=0.153, upper=0.073, covered=0.945, above=0.959)
"""Matrix products and attention: 82 rows to calibrate for 95 %, 73 judged. Covering 98.6 % of these took 0.123."""
CONVOLUTIONS = Interval(lower=0.313, upper=0.129, covered=0.954, above=1.0)
"""Steps with convolutions: 286 rows to calibrate for 95 %, 281 judged. Covering 97.9 % of these took 0.608."""
GIVEN_BACK = Interval(lower=0.0, upper=0.0, covered=0.99, above=0.99, lower_bytes=2 * MiB, upper_bytes=4 * MiB)
"""The CPU, where freed memory goes back at once: 338 rows of 10 families. For 99 %, one half of these gave 3.7 MiB above and
1.8 below, the other 4.0 and 2.6, which covered 99 % and all of the other half."""
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
