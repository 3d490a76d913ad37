"""Selective activation checkpointing: chooses the blocks with the least recomputation for which the whole step fits.

A dynamic program decides the blocks in forward order. It keeps only partial choices that no other one beats in both seconds
and bytes (G. L. Nemhauser and Z. Ullmann, "Discrete dynamic programming and capital allocation", Management Science 15(9),
1969). Bytes are compared at every moment that an undecided block can still change. A chain of equal blocks leaves one partial
choice per number of blocks. (Loading a general solver would take 16 MiB of the memory being planned.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memfit.planning.compose import Recompute
from memfit.profiling.timeline import Timeline

FOLLOWED = 64
"""Most partial choices kept; beyond this, the most promising ones stay."""


def choose_blocks(
    timeline: Timeline,
    recomputes: Sequence[Recompute],
    samples: int,
    room: float,
    seconds: Mapping[str, float],
    *,
    accumulates: bool = True,
) -> tuple[str, ...] | None:
    """Choose the blocks to checkpoint so that at most `room` bytes of tensors are allocated; None if no choice suffices.

    `accumulates=False` stands for a step of one micro-batch, which starts without gradients. The choice is the cheapest
    unless more than `FOLLOWED` partial choices came up.
    """
    names = list(dict.fromkeys(r.block for r in recomputes))
    if not names:
        return () if timeline.peak(samples, accumulates=accumulates) <= room else None
    moments = _Moments(timeline, recomputes, names, samples, accumulates)
    ways = _Ways(moments.alive - room, [max(seconds.get(name, 0.0), 1e-9) for name in names], moments.changes)
    for block in range(len(names)):
        ways.decide(block)
    chosen = ways.cheapest()
    return None if chosen is None else tuple(name for name, x in zip(names, chosen) if x)


class _Change(NamedTuple):
    """The bytes that checkpointing any of `blocks` adds to the allocated bytes after each event in [start, stop)."""

    blocks: frozenset[int]
    start: int
    stop: int
    size: float


Changes = dict[frozenset[int], np.ndarray]
"""Maps a set of blocks to the bytes that checkpointing any of them adds at each moment."""


class _Moments:
    """The moments of a possible peak: bytes allocated without checkpointing (`alive`), and the `changes` to them."""

    def __init__(
        self, timeline: Timeline, recomputes: Sequence[Recompute], names: list[str], samples: int, accumulates: bool
    ) -> None:
        self._timeline, self._sizes = timeline, timeline.sizes(samples)
        self._recomputes = [(names.index(r.block), r) for r in recomputes]
        self._dropped = [
            _Change(frozenset([block]), r.visit.stop, r.backward, -float(self._sizes[r.dropped].sum()))
            for block, r in self._recomputes
        ]
        self._held = [change for index in {i: None for r in recomputes for i in r.held} for change in self._hold(index)]
        curve = timeline.curve(samples, accumulates=accumulates)
        moments = [*self._stretches(curve), *self._recomputations(curve, accumulates)]
        self.alive = np.array([alive for alive, _ in moments])
        self.changes: Changes = {}
        for at, (_, changes) in enumerate(moments):
            for blocks, size in changes:
                self.changes.setdefault(blocks, np.zeros(len(moments)))[at] += size

    def _stretches(self, curve: np.ndarray) -> list[tuple[float, list[tuple[frozenset[int], float]]]]:
        """(allocated bytes, changes) at the highest event of each stretch with constant changes."""
        changes = [*self._dropped, *self._held]
        edges = sorted({0, len(curve), *(c.start for c in changes), *(c.stop for c in changes)})
        highest = [low + int(curve[low:high].argmax()) for low, high in itertools.pairwise(edges)]
        return [(float(curve[at]), [(c.blocks, c.size) for c in changes if c.start <= at < c.stop]) for at in highest]

    def _recomputations(
        self, curve: np.ndarray, accumulates: bool
    ) -> list[tuple[float, list[tuple[frozenset[int], float]]]]:
        """(allocated bytes, changes) while each block is recomputed, right before its backward."""
        window = self._timeline.window
        found = []
        for block, r in self._recomputes:
            if not accumulates and len(window) > 1 and r.visit.start >= window[1]:
                continue
            before = r.backward - 1
            changes = [(c.blocks, c.size) for c in self._dropped if c.start <= before < c.stop]
            changes += [(c.blocks, c.size) for c in self._held if c.start <= before and r.backward < c.stop]
            changes.append((frozenset([block]), r.peak(self._sizes) - float(self._sizes[r.returned].sum())))
            found.append((float(curve[before]), changes))
        return found

    def _hold(self, index: int) -> list[_Change]:
        """The stretches for which checkpointing may keep an input past its free, each up to the end of a block's backward."""
        until: dict[int, set[int]] = {}
        for block, r in self._recomputes:
            if index in r.held:
                until.setdefault(r.end, set()).add(block)
        ends = sorted(until)
        starts = [int(self._timeline.lifetimes()[1][index]), *ends]
        return [
            _Change(frozenset().union(*(until[end] for end in ends[k:])), starts[k], ends[k], float(self._sizes[index]))
            for k in range(len(ends))
        ]


class _Ways:
    """Partial choices (states of the dynamic program), each with its seconds and its bytes over the room at each moment."""

    def __init__(self, excess: np.ndarray, seconds: Sequence[float], changes: Changes) -> None:
        self._costs = seconds
        self._chosen = np.zeros((1, len(seconds)), dtype=bool)
        self._seconds = np.zeros(1)
        self._excess = excess[None, :]
        self._shared = {blocks: change for blocks, change in changes.items() if len(blocks) > 1}
        nothing = np.zeros(len(excess))
        self._own = np.array([changes.get(frozenset([block]), nothing) for block in range(len(seconds))])

    def decide(self, block: int) -> None:
        """Extend every partial choice with and without this block, then drop those that cannot fit or are dominated."""
        more = self._excess + self._own[block]
        for blocks, change in self._shared.items():
            if block in blocks:
                more = more + np.outer(~self._chosen[:, sorted(blocks)].any(1), change)
        chosen = self._chosen.copy()
        chosen[:, block] = True
        self._chosen = np.concatenate([self._chosen, chosen])
        self._seconds = np.concatenate([self._seconds, self._seconds + self._costs[block]])
        self._excess = np.concatenate([self._excess, more])
        at_best = np.minimum(self._own[block + 1 :], 0).sum(0)
        self._keep(np.flatnonzero((self._excess + at_best <= 0).all(1)))
        self._keep(_unbeaten(np.column_stack([self._seconds, self._comparable(block)])))
        if len(self._seconds) > FOLLOWED:
            self._keep(self._promising(block))

    def cheapest(self) -> np.ndarray | None:
        """Return the blocks that the cheapest choice checkpoints, as a mask; None if none fits."""
        if not len(self._seconds):
            return None
        return self._chosen[np.lexsort((self._chosen.sum(1), self._seconds))[0]]

    def _comparable(self, block: int) -> np.ndarray:
        """Columns that decide dominance for the blocks still to come; lower is better. They are the bytes at moments that later
        blocks can change (one column where the blocks so far change several alike), and which inputs are not kept yet."""
        left = {blocks: change for blocks, change in self._shared.items() if max(blocks) > block}
        later = (self._own[block + 1 :] != 0).any(0)
        for change in left.values():
            later |= change != 0
        begun = [change for blocks, change in self._shared.items() if min(blocks) <= block]
        histories = np.vstack([self._own[: block + 1], *begun])[:, later]
        _, alike = np.unique(histories, axis=1, return_index=True)
        bytes_then = self._excess[:, later][:, alike]
        held = [~self._chosen[:, sorted(blocks)].any(1) for blocks in left if min(blocks) <= block]
        return np.column_stack([bytes_then, *held])

    def _promising(self, block: int) -> np.ndarray:
        """The `FOLLOWED` to keep: those with the lowest bound on seconds, and the slowest, which most surely fits."""
        order = np.argsort(self._seconds + self._still_needed(block), kind="stable")
        return np.append(order[: FOLLOWED - 1], self._seconds.argmax())

    def _still_needed(self, block: int) -> np.ndarray:
        """A lower bound on the seconds still needed: the maximum over moments of a fractional knapsack, in which the best later
        blocks (the last one in part) bring that moment alone down to the room."""
        bound = np.zeros(len(self._seconds))
        costs = np.array(self._costs[block + 1 :])
        tight = (self._excess > 0).any(0)
        drops, alike = np.unique(np.maximum(-self._own[block + 1 :, tight], 0), axis=1, return_inverse=True)
        for kind, drop in enumerate(drops.T):
            best = sorted(np.flatnonzero(drop), key=lambda i: costs[i] / drop[i])
            reached, spent = np.cumsum([0.0, *drop[best]]), np.cumsum([0.0, *costs[best]])
            missing = self._excess[:, tight][:, alike.ravel() == kind].max(1)
            bound = np.maximum(bound, np.interp(missing, reached, spent))
        return bound

    def _keep(self, which: np.ndarray) -> None:
        self._chosen, self._seconds, self._excess = self._chosen[which], self._seconds[which], self._excess[which]


def _unbeaten(values: np.ndarray) -> np.ndarray:
    """The Pareto-optimal rows (lower is better); of equal rows, the first."""
    no_worse = (values[:, None, :] <= values[None, :, :]).all(2)
    first = np.arange(len(values))
    beats = no_worse & (~no_worse.T | (first[:, None] < first[None, :]))
    return np.flatnonzero(~beats.any(0))
