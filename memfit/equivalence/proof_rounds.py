"""Runs the parts of a proof, whose whole has run, and both once more from the state that a first batch leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from memfit.batches.pieces import bounds
from memfit.equivalence.host_reads import Reads
from memfit.equivalence.seen_effects import Trial
from memfit.equivalence.side_effects import STILL, Moves, composition_of
from memfit.tracing.sandbox import Traces

T = TypeVar("T")


@dataclass(frozen=True)
class Rounds(Generic[T]):
    """What the parts of a proof give."""

    parts: list[T]
    looks: list[Reads]
    """What each part reads of the batch."""
    moves: Moves
    """How the state that they change is composed."""
    later: tuple[T, list[T]] | None = None
    """What whole and parts give once more, if state is composed."""


def rounds_of(
    reads: Reads,
    measure: Callable[[int, int, Reads], T],
    trial: Trial,
    doubles: Iterable[Trial],
    aside: Callable[[], AbstractContextManager[Traces]],
    within: Callable[[], AbstractContextManager[None]],
    same: Callable[[T, T], bool],
    *,
    graphs: bool = False,
    draws: bool = False,
) -> Rounds[T]:
    """Runs the parts of a trial. `reads` are those of its whole; `measure(start, stop, reads)` returns what is compared of
    samples; `trial` and `doubles` show how state changes (`composition_of`). `aside` gives contexts that leave no trace,
    `within` those in which parts run in turn."""
    samples, moves = sum(trial.sizes), STILL

    def in_parts(looks: list[Reads]) -> list[T]:
        parts = []
        with within(), moves.composition.over_pass():
            for start, stop in bounds(trial.sizes):
                moves.composition.before_micro_batch()
                looks.append(Reads())
                parts.append(measure(start, stop, looks[-1]))
                moves.composition.after_micro_batch(stop - start)
        return parts

    looks, parts = list[Reads](), list[T]()
    if not reads.moved:
        with aside() as traces:
            parts = in_parts(looks)
            if not traces.moved():  # the whole changes nothing if state kept by size already has its size
                return Rounds(parts, looks, moves)
    looks, moves = [], composition_of(trial, doubles, aside, graphs=graphs, draws=draws)
    with aside():
        parts = in_parts(looks)
        moves, again = moves.repeated(partial(in_parts, []))
    moves = moves.unless(lambda: same(parts[-1], measure(samples - trial.sizes[-1], samples, Reads())), aside)
    if not again:
        return Rounds(parts, looks, moves)
    with aside():
        trial.run(0, samples)
        moves.composition.recount()
        return Rounds(parts, looks, moves, (measure(0, samples, Reads()), again))
