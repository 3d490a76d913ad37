"""Which blocks to checkpoint: the least recomputation for which every moment of the step fits.

Blocks are decided one after the other in the order of the forward. Of the ways to decide those so far, only such are followed
that no other beats in both seconds and bytes (G. L. Nemhauser and Z. Ullmann, "Discrete dynamic programming and capital
allocation", Management Science 15(9), 1969); bytes are compared at every moment that a block still to be decided can change.
In a chain of equal blocks that leaves one way per number of blocks. (A general solver would have to be loaded, which takes
16 MiB of the room that is being planned.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memfit.planning.compose import Recompute
from memfit.profiling.timeline import Timeline

FOLLOWED = 64
"""Ways that are followed at most: beyond, those that may still end up the cheapest."""


def choose_blocks(
    timeline: Timeline,
    recomputes: Sequence[Recompute],
    samples: int,
    room: float,
    seconds: Mapping[str, float],
    *,
    accumulates: bool = True,
) -> tuple[str, ...] | None:
    """Names of the blocks to checkpoint so that at most `room` bytes of tensors are alive; None if no choice suffices.

    `accumulates=False`: with a single micro-batch, during which gradients are only being born. The cheapest choice, unless
    more than `FOLLOWED` ways had to be followed.
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
    """What checkpointing any of some blocks adds to the bytes alive after each event from `start` up to `stop`."""

    blocks: frozenset[int]
    start: int
    stop: int
    size: float


Changes = dict[frozenset[int], np.ndarray]
"""From blocks to what is added, per moment, once any of them is checkpointed."""


class _Moments:
    """The moments at which memory may be highest: bytes `alive` with nothing checkpointed, and the `changes` to them."""

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
        """(bytes alive, changes) at the highest event of each stretch in which the changes are the same."""
        changes = [*self._dropped, *self._held]
        edges = sorted({0, len(curve), *(c.start for c in changes), *(c.stop for c in changes)})
        highest = [low + int(curve[low:high].argmax()) for low, high in itertools.pairwise(edges)]
        return [(float(curve[at]), [(c.blocks, c.size) for c in changes if c.start <= at < c.stop]) for at in highest]

    def _recomputations(
        self, curve: np.ndarray, accumulates: bool
    ) -> list[tuple[float, list[tuple[frozenset[int], float]]]]:
        """The same while each block is computed again, just before its backward."""
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
        """The stretches for which an input may be held beyond its death, each up to the end of some block's backward."""
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
    """Ways to decide the blocks so far, each with its seconds and the bytes by which it exceeds the room at each moment."""

    def __init__(self, excess: np.ndarray, seconds: Sequence[float], changes: Changes) -> None:
        self._costs = seconds
        self._chosen = np.zeros((1, len(seconds)), dtype=bool)
        self._seconds = np.zeros(1)
        self._excess = excess[None, :]
        self._shared = {blocks: change for blocks, change in changes.items() if len(blocks) > 1}
        nothing = np.zeros(len(excess))
        self._own = np.array([changes.get(frozenset([block]), nothing) for block in range(len(seconds))])

    def decide(self, block: int) -> None:
        """Each way with this block and without it, less those that can no longer fit or are beaten."""
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
        """Which blocks the cheapest way checkpoints; None if none fits."""
        if not len(self._seconds):
            return None
        return self._chosen[np.lexsort((self._chosen.sum(1), self._seconds))[0]]

    def _comparable(self, block: int) -> np.ndarray:
        """What distinguishes the ways in what blocks after this one will meet, less is better: bytes at the moments they can
        change, once for all moments that the blocks so far change alike, and what need not be held anew."""
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
        """As many ways as are followed: those that need the fewest seconds at the least, and the slowest, which most surely
        fits."""
        order = np.argsort(self._seconds + self._still_needed(block), kind="stable")
        return np.append(order[: FOLLOWED - 1], self._seconds.argmax())

    def _still_needed(self, block: int) -> np.ndarray:
        """A lower bound of the seconds to come: at each moment by itself, what the best of the blocks after this one, the
        last of them in part, need to bring it down to the room."""
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
    """The rows that no other is at most equal to in every column; of equal rows the first."""
    no_worse = (values[:, None, :] <= values[None, :, :]).all(2)
    first = np.arange(len(values))
    beats = no_worse & (~no_worse.T | (first[:, None] < first[None, :]))
    return np.flatnonzero(~beats.any(0))
