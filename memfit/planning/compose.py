"""The effect of checkpointing blocks, composed on a timeline traced without it.

A checkpointed block's saved activations die at the end of its forward; right before its backward the forward's allocations
happen again. Not covered: what differs inside the recomputation (it stops early once all it needs is there), and blocks
that run more than once per forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from memfit.profiling.timeline import CATEGORIES, Timeline, Visit

_KEPT, _TRANSIENT = CATEGORIES.index("kept"), CATEGORIES.index("transient")


@dataclass(frozen=True)
class Recompute:
    """What checkpointing one block changes."""

    block: str
    """The block's name."""
    visit: Visit
    """Its forward in the micro-batch looked at."""
    dropped: np.ndarray
    """Allocations it saves for backward and would drop."""
    backward: int
    """The event its backward begins with."""


def recomputable(timeline: Timeline, names: Iterable[str]) -> tuple[Recompute, ...]:
    """The blocks of `names` that can be checkpointed, once for each traced micro-batch, in forward order."""
    born, died = timeline.lifetimes()
    ends = (*timeline.window[1:], len(timeline.event))
    found = []
    for name in names:
        visits = [
            [v for v in timeline.visits if v.block == name and start <= v.start < end]
            for start, end in zip(timeline.window, ends)
        ]
        if visits and all(len(v) == 1 and v[0].phase == "forward" for v in visits):
            found += [_recompute(timeline, v[0], born, died) for v in visits]
    useless = {r.block for r in found if not len(r.dropped)}
    return tuple(sorted((r for r in found if r.block not in useless), key=lambda r: r.visit.start))


def _recompute(timeline: Timeline, visit: Visit, born: np.ndarray, died: np.ndarray) -> Recompute:
    dropped = _dropped(visit, born, died)
    begins = _backward_start(timeline, visit, dropped, died) if len(dropped) else visit.stop
    return Recompute(visit.block, visit, dropped, begins)


def with_checkpoint(timeline: Timeline, names: Iterable[str]) -> Timeline:
    """The timeline with these blocks checkpointed in every traced micro-batch."""
    edit = _Edit(timeline)
    for recompute in recomputable(timeline, tuple(names)):
        edit.checkpoint(recompute)
    return edit.done()


class _Edit:
    """Changes to a timeline's events, collected by position and applied in one go."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._before: dict[int, list[tuple[int, bool]]] = {}
        self._moved: dict[int, int] = {}
        self._lives_until: dict[int, int] = {}
        self._origin: list[int] = list(range(len(timeline.fixed)))
        self._born, self._died = timeline.lifetimes()

    def checkpoint(self, recompute: Recompute) -> None:
        timeline, visit = self._timeline, recompute.visit
        for index in recompute.dropped.tolist():
            self._insert(visit.stop, index, False)
        again = self._again(recompute)
        for index in visit.inputs:
            # Checkpointing keeps the block's inputs, which otherwise may be gone by then.
            if visit.start <= self._died[index] < recompute.backward:
                self._lives_until[index] = max(recompute.backward, self._lives_until.get(index, 0))
        for event in range(visit.start, visit.stop):
            index = int(timeline.event[event])
            if index in again:
                self._insert(recompute.backward, again[index], bool(timeline.birth[event]))
        dropped = set(recompute.dropped.tolist())
        for index, copy in again.items():
            if index in dropped:
                self._moved[int(self._died[index])] = copy
            elif self._died[index] >= visit.stop:  # the block's output, made once more and dropped again
                self._insert(recompute.backward, copy, False)

    def _again(self, recompute: Recompute) -> dict[int, int]:
        """The allocations born in the block's forward, and the numbers of their second lives."""
        visit = recompute.visit
        window = range(visit.start, visit.stop)
        born = [int(self._timeline.event[e]) for e in window if self._timeline.birth[e]]
        again = {}
        for index in born:
            again[index] = len(self._origin)
            self._origin.append(index)
        return again

    def _insert(self, before: int, index: int, birth: bool) -> None:
        self._before.setdefault(before, []).append((index, birth))

    def done(self) -> Timeline:
        timeline = self._timeline
        removed = {int(self._died[index]) for index in self._lives_until}
        for index, event in self._lives_until.items():
            self._insert(event, index, False)
        events: list[int] = []
        births: list[bool] = []
        position = np.zeros(len(timeline.event) + 1, dtype=np.int64)
        for at in range(len(timeline.event) + 1):
            for index, birth in self._before.get(at, ()):
                events.append(index)
                births.append(birth)
            position[at] = len(events)
            if at < len(timeline.event) and at not in removed:
                events.append(self._moved.get(at, int(timeline.event[at])))
                births.append(bool(timeline.birth[at]))
        origin = np.array(self._origin)
        return replace(
            timeline,
            fixed=timeline.fixed[origin],
            per_sample=timeline.per_sample[origin],
            category=timeline.category[origin],
            owner=timeline.owner[origin],
            event=np.array(events, dtype=np.int32),
            birth=np.array(births, dtype=bool),
            phases=tuple(replace(p, start=int(position[p.start])) for p in timeline.phases),
            window=tuple(int(position[w]) for w in timeline.window),
            visits=tuple(replace(v, start=int(position[v.start]), stop=int(position[v.stop])) for v in timeline.visits),
        )


def _dropped(visit: Visit, born: np.ndarray, died: np.ndarray) -> np.ndarray:
    inside = (born >= visit.start) & (born < visit.stop) & (died >= visit.stop)
    inside[list(visit.outputs)] = False
    return np.nonzero(inside)[0]


def _backward_start(timeline: Timeline, visit: Visit, dropped: np.ndarray, died: np.ndarray) -> int:
    """Where the block's backward begins: the first birth in backward that belongs to it, or the first death of what it saved."""
    first_death = int(died[dropped].min())
    owners = {i for i, name in enumerate(timeline.owners) if name == visit.block or name.startswith(f"{visit.block}.")}
    backward = next((p.start for p in timeline.phases if p.name == "backward" and p.start >= visit.stop), visit.stop)
    for event in range(backward, first_death):
        if timeline.birth[event] and int(timeline.owner[timeline.event[event]]) in owners:
            return event
    return first_death
