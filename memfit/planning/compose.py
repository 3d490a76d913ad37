"""Predicts activation checkpointing: edits a timeline that was traced without it instead of tracing again.

A checkpointed block frees its saved activations at the end of its forward and keeps its inputs until its backward ends. Right
before its backward, its forward's allocations happen again, up to the last one that is saved. Weight copies in autocast's cache
live until the whole forward ends. Not covered: activations that a forward without saving frees earlier, copies of a block's
buffers during recomputation, the order of frees within an operation's backward, and blocks that run more than once per forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from memfit.profiling.timeline import CATEGORIES, Timeline, Visit

_KEPT, _TRANSIENT = CATEGORIES.index("kept"), CATEGORIES.index("transient")


@dataclass(frozen=True)
class Recompute:
    """The changes to a timeline that checkpointing one block makes."""

    block: str
    """The block's name."""
    visit: Visit
    """Its forward in one traced micro-batch."""
    dropped: np.ndarray
    """Allocations saved for backward, which checkpointing frees at the end of the block's forward."""
    copies: np.ndarray
    """Those that look like weights in half precision, which autocast's cache keeps until the whole forward ends."""
    over: int
    """The event at which the whole forward ends."""
    returned: np.ndarray
    """Outputs that the block's own backward needs: freed when that begins, and recomputed."""
    again: tuple[tuple[int, bool], ...]
    """(allocation, birth) for every event of the recomputation; birth is False for a free."""
    backward: int
    """The first event of its backward."""
    end: int
    """One past the event that frees the last of its saved allocations."""
    held: tuple[int, ...]
    """Inputs that are freed earlier without checkpointing, and stay until `end` with it."""

    def peak(self, sizes: np.ndarray) -> float:
        """Return the peak bytes that the recomputation adds, for allocations of these sizes."""
        if not self.again:
            return 0.0
        index, birth = (np.array(column) for column in zip(*self.again))
        return float(np.cumsum(np.where(birth, sizes[index], -sizes[index])).max(initial=0.0))


def recomputable(timeline: Timeline, names: Iterable[str]) -> tuple[Recompute, ...]:
    """Return the blocks of `names` that can be checkpointed, once per traced micro-batch, in forward order."""
    born, died = timeline.lifetimes()
    ends = (*timeline.window[1:], len(timeline.event))
    halves = _halves_of_parameters(timeline)
    found = []
    for name in names:
        visits = [
            [v for v in timeline.visits if v.block == name and start <= v.start < end]
            for start, end in zip(timeline.window, ends)
        ]
        if visits and all(len(v) == 1 and v[0].phase == "forward" for v in visits):
            found += [_recompute(timeline, v[0], born, died, halves) for v in visits]
    useless = {r.block for r in found if not len(r.dropped)}
    return tuple(sorted((r for r in found if r.block not in useless), key=lambda r: r.visit.start))


def _recompute(timeline: Timeline, visit: Visit, born: np.ndarray, died: np.ndarray, halves: np.ndarray) -> Recompute:
    over = next((p.start for p in timeline.phases if p.name == "backward" and p.start >= visit.stop), visit.stop)
    dropped = _dropped(visit, born, died, over)
    copies = dropped[halves[dropped]]
    if not len(dropped):
        return Recompute(visit.block, visit, dropped, copies, over, dropped, (), visit.stop, visit.stop, ())
    backward = _backward_start(timeline, visit, dropped, born, died)
    outputs = np.array(visit.outputs, dtype=np.int64)
    returned = outputs[(born[outputs] >= visit.start) & (died[outputs] >= backward)]
    saved = np.concatenate([dropped, returned])
    end = min(int(died[saved].max()) + 1, len(timeline.event))
    held = tuple(i for i in visit.inputs if visit.start <= died[i] < end and i not in saved)
    again = _again(timeline, visit, saved, born)
    return Recompute(visit.block, visit, dropped, copies, over, returned, again, backward, end, held)


def _again(timeline: Timeline, visit: Visit, saved: np.ndarray, born: np.ndarray) -> tuple[tuple[int, bool], ...]:
    """The events of the block's recomputed forward: it stops after its last saved allocation and frees the rest."""
    last = int(born[saved].max())
    kept, alive = set(saved.tolist()), dict[int, None]()
    found: list[tuple[int, bool]] = []
    for event in range(visit.start, last + 1):
        index, birth = int(timeline.event[event]), bool(timeline.birth[event])
        if birth:
            alive[index] = None
        elif index not in alive:
            continue
        else:
            del alive[index]
        found.append((index, birth))
    return (*found, *((index, False) for index in alive if index not in kept))


def _halves_of_parameters(timeline: Timeline) -> np.ndarray:
    """A mask of allocations of half some parameter's size that do not depend on the micro-batch."""
    parameters = timeline.fixed[timeline.category == CATEGORIES.index("parameters")]
    return (timeline.per_sample == 0) & (timeline.fixed > 0) & np.isin(2 * timeline.fixed, parameters)


def with_checkpoint(timeline: Timeline, names: Iterable[str], *, autocast: bool = False) -> Timeline:
    """Checkpoint these blocks in every traced micro-batch of a timeline; `autocast` says that autocast was on in the trace."""
    edit = _Edit(timeline, autocast)
    for recompute in recomputable(timeline, tuple(names)):
        edit.checkpoint(recompute)
    return edit.done()


class _Edit:
    """Edits to a timeline's events, collected by position and applied in one pass."""

    def __init__(self, timeline: Timeline, autocast: bool) -> None:
        self._timeline, self._autocast = timeline, autocast
        self._before: dict[int, list[tuple[int, bool]]] = {}
        self._moved: dict[int, int] = {}
        self._lives_until: dict[int, int] = {}
        self._origin: list[int] = list(range(len(timeline.fixed)))
        self._born, self._died = timeline.lifetimes()

    def checkpoint(self, recompute: Recompute) -> None:
        kept = set(recompute.copies.tolist()) if self._autocast else set()
        for index in recompute.dropped.tolist():
            self._insert(recompute.over if index in kept else recompute.visit.stop, index, False)
        for index in recompute.returned.tolist():
            self._insert(recompute.backward, index, False)
        for index in recompute.held:
            self._lives_until[index] = max(recompute.end, self._lives_until.get(index, 0))
        copies = self._copies(recompute)
        for index, birth in recompute.again:
            self._insert(recompute.backward, copies[index], birth)
        for index in (*recompute.dropped.tolist(), *recompute.returned.tolist()):
            self._moved[int(self._died[index])] = copies[index]

    def _copies(self, recompute: Recompute) -> dict[int, int]:
        """New allocation numbers for what is recomputed."""
        copies = {}
        for index, birth in recompute.again:
            if birth:
                copies[index] = len(self._origin)
                self._origin.append(index)
        return copies

    def _insert(self, before: int, index: int, birth: bool) -> None:
        self._before.setdefault(before, []).append((index, birth))

    def done(self) -> Timeline:
        timeline = self._timeline
        removed = {int(self._died[index]) for index in self._lives_until}
        for index, event in self._lives_until.items():
            # Before any recomputation there: a block's backward ends before another block's backward begins.
            self._before.setdefault(event, []).insert(0, (index, False))
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
            operation=None if timeline.operation is None else timeline.operation[origin],
            event=np.array(events, dtype=np.int32),
            birth=np.array(births, dtype=bool),
            phases=tuple(replace(p, start=int(position[p.start])) for p in timeline.phases),
            window=tuple(int(position[w]) for w in timeline.window),
            visits=tuple(replace(v, start=int(position[v.start]), stop=int(position[v.stop])) for v in timeline.visits),
        )


def _dropped(visit: Visit, born: np.ndarray, died: np.ndarray, over: int) -> np.ndarray:
    inside = (born >= visit.start) & (born < visit.stop) & (died >= over)
    inside[list(visit.outputs)] = False
    return np.nonzero(inside)[0]


def _backward_start(timeline: Timeline, visit: Visit, dropped: np.ndarray, born: np.ndarray, died: np.ndarray) -> int:
    """The event at which the block's backward begins: its first allocation in backward, or the first free of what it saved."""
    first_death = int(died[dropped].min())
    owners = {i for i, name in enumerate(timeline.owners) if name == visit.block or name.startswith(f"{visit.block}.")}
    backward = next((p.start for p in timeline.phases if p.name == "backward" and p.start >= visit.stop), visit.stop)
    for event in range(backward, first_death):
        if timeline.birth[event] and int(timeline.owner[timeline.event[event]]) in owners:
            if not _sums_gradients(timeline, event, backward, born):
                return event
    return first_death


def _sums_gradients(timeline: Timeline, event: int, backward: int, born: np.ndarray) -> bool:
    """Whether the allocation at `event` is autograd's sum of two gradients, freed right after: no operation has begun yet."""
    pair = timeline.event[event + 1 : event + 3]
    if len(pair) < 2 or timeline.birth[event + 1 : event + 3].any() or (born[pair] < backward).any():
        return False
    one = timeline.event[event]
    return all((of[pair] == of[one]).all() for of in (timeline.fixed, timeline.per_sample))
