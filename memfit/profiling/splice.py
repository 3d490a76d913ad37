"""Joins a step recorded up to its optimizer step with the optimizer step of another recording. An optimizer step does not
depend on the micro-batch, so it is traced once.

Pure values. Not covered: steps that replace what exists before them (a cache rebuilt in every forward); they are traced whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memfit.profiling.operations import Operations
from memfit.profiling.timeline import CATEGORIES, Phase, Timeline, Visit

_LASTING = [CATEGORIES.index(name) for name in ("parameters", "buffers", "gradients", "optimizer")]
_STATE = CATEGORIES.index("optimizer")


def continued(begun: Timeline, like: Timeline) -> Timeline | None:
    """Joins `begun`, recorded up to the hand-over, with the optimizer step of `like`; optimizer state exists from the start.
    None if the two recordings start with different allocations, or leave different ones to the optimizer."""
    span = like.span("optimizer")
    numbers = None if span is None else _Numbers.of(begun, like, span[0])
    if span is None or numbers is None:
        return None
    end, shift, tail = span[0], numbers.present - begun.phases[1].start, numbers.tail
    owners = tuple(dict.fromkeys((*begun.owners, *like.owners)))
    owner_of = np.array([owners.index(name) for name in like.owners], dtype=np.int32)
    joined = Timeline(
        fixed=numbers.column(begun.fixed, like.fixed),
        per_sample=numbers.column(begun.per_sample, like.per_sample),
        category=numbers.column(begun.category, like.category),
        owner=numbers.column(begun.owner, owner_of[like.owner]),
        event=_events(begun, numbers, tail[like.event[end:]]),
        birth=np.concatenate([np.ones(numbers.present, dtype=bool), begun.birth[numbers.there :], like.birth[end:]]),
        owners=owners,
        phases=(*_later(begun.phases, shift), Phase("optimizer", len(begun.event) + shift)),
        window=tuple(start + shift for start in begun.window),
        visits=tuple(_moved(visit, shift, numbers.own) for visit in begun.visits),
        operations=_operations(begun, like, end, shift),
        **_makers(begun, like, numbers),
    )
    return joined if _alike(joined, numbers.left, like, numbers.theirs) else None


def _operations(begun: Timeline, like: Timeline, end: int, shift: int) -> Operations | None:
    """The operations of `begun`, and then the optimizer step of `like`, which begins there at event `end`."""
    if begun.operations is None or like.operations is None:
        return None
    last = len(begun.event)
    own = begun.operations.part(0, last + 1, shift)
    return own.followed_by(like.operations.part(end, len(like.event) + 1, last + shift - end))


def _makers(begun: Timeline, like: Timeline, numbers: _Numbers) -> dict[str, Any]:
    """The operation that created each allocation, if both recordings know it."""
    if begun.operation is None or like.operation is None:
        return {}
    names = tuple(dict.fromkeys((*begun.operation_names, *like.operation_names)))
    own, theirs = (
        np.array([names.index(name) for name in one.operation_names], dtype=np.int32)[one.operation] for one in (begun, like)
    )
    return {"operation": numbers.column(own, theirs), "operation_names": names}


@dataclass(frozen=True)
class _Numbers:
    """The numbers of both recordings' allocations in the joined one: in the order of their births."""

    there: int
    """Number of allocations that `begun` starts with."""
    present: int
    """Number of allocations that the joined one starts with."""
    own: np.ndarray
    """New numbers of the allocations of `begun`."""
    state: np.ndarray
    """New numbers of the optimizer state, if `begun` had none yet; they are the numbers in `like`."""
    made: np.ndarray
    """Allocations that the optimizer step of `like` creates, in its own numbers."""
    left: np.ndarray
    """Allocations alive when the optimizer step begins, in new numbers."""
    theirs: np.ndarray
    """The same allocations, in the numbers of `like`."""

    @staticmethod
    def of(begun: Timeline, like: Timeline, end: int) -> _Numbers | None:
        """Returns the numbers; None if the two recordings do not start, or do not end, with the same allocations."""
        there, present = begun.phases[1].start, like.phases[1].start
        standing = np.arange(present)
        kept = standing if there == present else standing[like.category[:present] != _STATE]
        if not _alike(begun, np.arange(there), like, kept):
            return None
        own = np.concatenate([kept, np.arange(present, present + len(begun.fixed) - there)])
        state = np.setdiff1d(standing, kept)
        left = np.sort(np.concatenate([own[_alive(begun, len(begun.event))], state]))
        made, theirs = like.event[end:][like.birth[end:]], _alive(like, end)
        return None if len(left) != len(theirs) else _Numbers(there, present, own, state, made, left, theirs)

    @property
    def tail(self) -> np.ndarray:
        """New numbers of the allocations of `like` that its optimizer step involves."""
        found = np.zeros(max([-1, *self.theirs.tolist(), *self.made.tolist()]) + 1, dtype=np.int32)
        found[self.theirs] = self.left
        found[self.made] = np.arange(len(self.made)) + len(self.own) + len(self.state)
        return found

    def column(self, own: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Merges a column of both recordings, in new numbers."""
        found = np.empty(len(self.own) + len(self.state) + len(self.made), dtype=own.dtype)
        found[self.own], found[self.state] = own, theirs[self.state]
        found[len(self.own) + len(self.state) :] = theirs[self.made]
        return found


def _events(begun: Timeline, numbers: _Numbers, tail: np.ndarray) -> np.ndarray:
    during = numbers.own[begun.event[numbers.there :]]
    return np.concatenate([np.arange(numbers.present), during, tail]).astype(np.int32)


def _alive(timeline: Timeline, event: int) -> np.ndarray:
    """Allocations alive before an event, in the order of their births."""
    net = np.zeros(len(timeline.fixed), dtype=np.int64)
    np.add.at(net, timeline.event[:event], np.where(timeline.birth[:event], 1, -1))
    return np.flatnonzero(net)


def _alike(a: Timeline, chosen: np.ndarray, b: Timeline, others: np.ndarray) -> bool:
    """Whether these allocations have the same categories, and the persistent ones the same sizes."""
    if len(chosen) != len(others) or (a.category[chosen] != b.category[others]).any():
        return False
    lasting = np.isin(a.category[chosen], _LASTING)
    return bool((a.fixed[chosen][lasting] == b.fixed[others][lasting]).all())


def _later(phases: tuple[Phase, ...], shift: int) -> tuple[Phase, ...]:
    return (phases[0], *(replace(phase, start=phase.start + shift) for phase in phases[1:]))


def _moved(visit: Visit, shift: int, own: np.ndarray) -> Visit:
    inputs, outputs = (tuple(int(own[i]) for i in ids) for ids in (visit.inputs, visit.outputs))
    return replace(visit, start=visit.start + shift, stop=visit.stop + shift, inputs=inputs, outputs=outputs)
