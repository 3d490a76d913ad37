"""Coordinates passes that need all ranks: with sharded parameters, a forward or backward all-gathers them from every rank.

A rank announces its pass first. Ranks without one at that moment run an empty pass along, on inputs they have seen, with zero
gradients. So ranks may run different numbers of micro-batches, proofs and evaluations. Passes run one kind at a time, and
backwards before new forwards. Passes outside the training run on one rank at a time. Not covered: ranks whose forwards go
through different modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PASSES = 1000
"""Wants are request codes. From this value on they are passes, not services."""
GLANCE, APART, COUNTED = 0, 1, 2
"""Kinds of passes: without gradients; with gradients outside the training; with gradients of the training."""


FORWARD, MORE, BACKWARD, LOOK = 1, 2, 3, 4
"""Stages: a forward before a backward; another forward before it; the backward; a forward without gradients."""
STAGE, OWN = 1_000_000, 10
"""Factors that encode the stage and the rank in a want."""


def begins(want: int) -> bool:
    """Whether `want` is a forward, with no earlier forward that still waits for its backward."""
    return (want - PASSES) // STAGE == FORWARD


class Passes:
    """Tracks which pass is in progress on all ranks; `rank` is this one. `along(kind, stage, numbers)` runs an empty pass,
    with the numbers that came with the request."""

    def __init__(self, rank: int, along: Callable[[int, int, Sequence[float]], None]) -> None:
        self._rank, self._along = rank, along
        self._under_way: int | None = None
        self._takes_part = False

    def forward(self, kind: int, *, anew: bool) -> int:
        """Return the want to announce before a forward. `anew`: no graph of an earlier forward waits for its backward."""
        which = self._which(kind)
        if kind == GLANCE:
            return PASSES + LOOK * STAGE + which
        more = not anew and self._takes_part and self._under_way == which
        return PASSES + (MORE if more else FORWARD) * STAGE + which

    def backward(self, kind: int) -> int:
        """Return the want to announce before the backward of that forward."""
        return PASSES + BACKWARD * STAGE + self._which(kind)

    def _which(self, kind: int) -> int:
        return kind + (OWN * (1 + self._rank) if kind == APART else 0)

    def chosen(self, wants: Sequence[int]) -> int:
        """Return the pass to run now among the wanted ones, or 0 if there is none. The result is the same on every rank."""
        wanted = sorted(want - PASSES for want in wants if want >= PASSES)
        stages = (MORE, BACKWARD) if self._under_way is not None else (LOOK, FORWARD)
        found = [w for stage in stages for w in wanted if w // STAGE == stage]
        if not found and wanted:  # a forward whose backward never came
            self._under_way, self._takes_part = None, False
            return self.chosen(wants)
        return PASSES + found[0] if found else 0

    def do(self, chosen: int, mine: bool, numbers: Sequence[float]) -> None:
        """Run the chosen pass. If it is `mine`, this rank runs it itself."""
        stage, which = divmod(chosen - PASSES, STAGE)
        if stage == FORWARD:
            self._under_way, self._takes_part = which, mine
        if stage == BACKWARD:
            self._under_way, self._takes_part = None, False
        if not mine:
            self._along(which % OWN, stage, numbers)
