"""The result of running one effective batch both ways: as plain PyTorch does, and as the plan does.

Holds only the result; the training makes the comparison. Not covered: later batches, which may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from memfit.reporting.words import relative

UNCLEAR = 0.05
"""A floor above this is more than rounding: the whole batch run twice does not even equal itself."""


@dataclass(frozen=True)
class Verification:
    """Measures how far the plan's gradient is from the whole batch's, on the same samples and random draws."""

    relative_error: float
    """Relative L2 difference of the gradient, all parameters concatenated."""
    floor: float
    """The same difference by rounding alone in plain PyTorch: another summation order, or parameters off by their last bit."""
    samples: int
    """Number of samples compared."""
    pieces: tuple[int, ...]
    """Samples in each micro-batch used."""
    worst_parameter: str
    """The parameter whose gradient differs most."""
    worst_error: float
    """Relative L2 difference of that gradient."""
    loss_error: float
    """Relative difference of the loss."""
    tolerance: float
    """The largest relative_error that counts as equal."""
    unsliced: tuple[str, ...] = ()
    """Random operators whose draws could not be sliced per micro-batch; their draws differ between the two runs."""
    notes: tuple[str, ...] = ()
    """What the reader should know about these numbers."""

    @property
    def passed(self) -> bool:
        """Whether it is the same training: relative_error within tolerance. False also if the gradient is not finite, or if
        the comparison is not clear."""
        return self.relative_error <= self.tolerance and self.clear

    @property
    def clear(self) -> bool:
        """Whether the comparison can tell anything: the whole batch equals itself up to rounding."""
        return self.floor <= UNCLEAR

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> tuple[str, ...]:
        """Describe the result in words; the first line is the answer."""
        says = "gradient equals the whole batch's to" if self.passed else "gradient DIFFERS from the whole batch's by"
        if not self.clear:
            return (
                f"inconclusive: plain PyTorch run twice on the whole batch differs by {relative(self.floor)}",
                *self.notes,
            )
        floor = f"floor of plain PyTorch {relative(self.floor)}"
        on = f"on {self.samples} samples as {cut_as(self.pieces)}"
        lines = [f"{says} {relative(self.relative_error)} ({floor}), {on}"]
        if not self.passed:
            worst = f"{self.worst_parameter} {relative(self.worst_error)}"
            lines.append(f"allowed {relative(self.tolerance)}; worst {worst}; the loss differs by {relative(self.loss_error)}")
        if self.unsliced:
            lines.append(f"redrawn in each micro-batch, not compared: {', '.join(self.unsliced)}")
        return (*lines, *self.notes)


def cut_as(pieces: Sequence[int]) -> str:
    """Format the sizes of micro-batches: "5 + 8 + 11", or "6 x 9 + 5 x 2" if there are many."""
    if len(pieces) <= 4:
        return " + ".join(str(size) for size in pieces)
    runs = [(size, len(list(run))) for size, run in groupby(pieces)]
    shown = [f"{size} x {count}" if count > 1 else str(size) for size, count in runs[:4]]
    return " + ".join([*shown, f"... ({len(pieces)} micro-batches)"] if len(runs) > 4 else shown)
