"""Passes that take all processes: where parameters are held in parts, a forward or backward gathers them from everywhere.

A process that runs one says so first; those that do not run one at that moment run an empty one along, on inputs they have
seen, whose gradients are zeros. So micro-batches, proofs and evaluations need not come in equal numbers. Passes are done one
kind at a time, backwards before new forwards; those that are apart from the training, one process at a time. Not covered:
processes whose forwards go through different modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PASSES = 1000
"""Wants from here on are passes, not services."""
GLANCE, APART, COUNTED = 0, 1, 2
"""Kinds of passes: without gradients; with gradients that are no part of the training's; with those that are."""


FORWARD, MORE, BACKWARD, LOOK = 1, 2, 3, 4
"""Stages: a forward that a backward will follow, another one before that, the backward; a forward without gradients."""
STAGE, OWN = 1_000_000, 10
"""What stages and processes are told apart by in a want."""


def begins(want: int) -> bool:
    """Whether what is wanted is a forward before which there was no other one that waits for its backward."""
    return (want - PASSES) // STAGE == FORWARD


class Passes:
    """Which pass is under way among the processes, of which this is `rank`. `along(kind, stage, numbers)` runs an empty one;
    the numbers are those that the pass was asked for with."""

    def __init__(self, rank: int, along: Callable[[int, int, Sequence[float]], None]) -> None:
        self._rank, self._along = rank, along
        self._under_way: int | None = None
        self._takes_part = False

    def forward(self, kind: int, *, anew: bool) -> int:
        """What to ask for before a forward; `anew`: no graph of another one waits for its backward."""
        which = self._which(kind)
        if kind == GLANCE:
            return PASSES + LOOK * STAGE + which
        more = not anew and self._takes_part and self._under_way == which
        return PASSES + (MORE if more else FORWARD) * STAGE + which

    def backward(self, kind: int) -> int:
        """What to ask for before the backward of that forward."""
        return PASSES + BACKWARD * STAGE + self._which(kind)

    def _which(self, kind: int) -> int:
        return kind + (OWN * (1 + self._rank) if kind == APART else 0)

    def chosen(self, wants: Sequence[int]) -> int:
        """The pass that is done now, of those that are wanted; 0 where none is. The same on every process."""
        wanted = sorted(want - PASSES for want in wants if want >= PASSES)
        stages = (MORE, BACKWARD) if self._under_way is not None else (LOOK, FORWARD)
        found = [w for stage in stages for w in wanted if w // STAGE == stage]
        if not found and wanted:  # a forward whose backward never came
            self._under_way, self._takes_part = None, False
            return self.chosen(wants)
        return PASSES + found[0] if found else 0

    def do(self, chosen: int, mine: bool, numbers: Sequence[float]) -> None:
        """The pass is done now, by this process itself if it is `mine`."""
        stage, which = divmod(chosen - PASSES, STAGE)
        if stage == FORWARD:
            self._under_way, self._takes_part = which, mine
        if stage == BACKWARD:
            self._under_way, self._takes_part = None, False
        if not mine:
            self._along(which % OWN, stage, numbers)
