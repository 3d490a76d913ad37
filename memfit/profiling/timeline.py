"""The allocations of one training step as numbers: what is born when, how large for how many samples, what it is for.

Pure values over numpy; nothing here imports torch. Not covered: memory that is no tensor's storage (scratch inside kernels,
the allocator's own waste); `allocator.py` adds what is known of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memfit.profiling.operations import Operations, fit_operations

CATEGORIES = ("parameters", "buffers", "input", "gradients", "optimizer", "kept", "transient", "other")
"""What an allocation is for: kept is saved for backward, transient comes and goes while computing."""
_COMPUTED = [CATEGORIES.index(name) for name in ("kept", "transient", "other")]


@dataclass(frozen=True)
class Phase:
    """A stretch of the step."""

    name: str
    """present, input, forward, backward, hand over, clip, optimizer; or evaluation."""
    start: int
    """The event it begins with."""


@dataclass(frozen=True)
class Visit:
    """One run through a block's forward."""

    block: str
    """The block's name."""
    start: int
    """The event it begins with."""
    stop: int
    """One past its last event."""
    phase: str
    """forward; or backward, where the script's own checkpointing recomputes."""
    inputs: tuple[int, ...]
    """Allocations that come in."""
    outputs: tuple[int, ...]
    """Allocations that go out."""


@dataclass(frozen=True)
class Timeline:
    """Allocations and the order of their births and deaths over one optimizer step in steady state."""

    fixed: np.ndarray
    """Bytes of each allocation that do not depend on the micro-batch (float64)."""
    per_sample: np.ndarray
    """Bytes of each allocation per sample of the micro-batch (float64)."""
    category: np.ndarray
    """Index into CATEGORIES for each allocation (int8)."""
    owner: np.ndarray
    """Index into `owners` for each allocation (int32)."""
    event: np.ndarray
    """The allocation each event is about (int32), in order of time."""
    birth: np.ndarray
    """Whether the event is a birth (bool)."""
    owners: tuple[str, ...]
    """Names of the modules that allocate; "" is outside any module."""
    phases: tuple[Phase, ...]
    """In order; the first starts at event 0 with what exists before the step."""
    window: tuple[int, ...] = ()
    """Events at which each traced micro-batch begins."""
    visits: tuple[Visit, ...] = ()
    """Runs through blocks, in order."""
    operations: Operations | None = None
    """What is computed meanwhile, where that was recorded."""
    operation: np.ndarray | None = None
    """Index into `operation_names` for each allocation (int32): what it was made by; None where that was not recorded."""
    operation_names: tuple[str, ...] = ()
    """Names of operations that make storages; "" for what was there before the first."""

    def sizes(self, samples: int) -> np.ndarray:
        """Bytes of each allocation at a micro-batch of `samples`."""
        return np.maximum(self.fixed + self.per_sample * samples, 0.0)

    def curve(self, samples: int, *, accumulates: bool = True) -> np.ndarray:
        """Bytes alive after each event; `accumulates=False`: with a single micro-batch, events of the second count 0."""
        size = self.sizes(samples)[self.event]
        curve = np.cumsum(np.where(self.birth, size, -size))
        if not accumulates and len(self.window) > 1:
            # What the second micro-batch allocates it frees again: without it the rest runs the same.
            over = next((p.start for p in self.phases if p.name == "hand over"), len(curve))
            curve[self.window[1] : over] = 0.0
        return curve

    def peak(self, samples: int, *, accumulates: bool = True) -> int:
        """Most bytes alive at once at a micro-batch of `samples`; `accumulates=False`: with a single micro-batch, during
        which the gradients are only being born."""
        return int(self.curve(samples, accumulates=accumulates).max(initial=0.0))

    def at(self, event: int, samples: int) -> dict[str, int]:
        """Bytes alive after `event`, by category."""
        weights = np.where(self.birth[: event + 1], 1.0, -1.0) * self.sizes(samples)[self.event[: event + 1]]
        sums = np.bincount(self.category[self.event[: event + 1]], weights=weights, minlength=len(CATEGORIES))
        return {name: int(size) for name, size in zip(CATEGORIES, sums) if size > 0.5}

    def peak_event(self, samples: int, *, accumulates: bool = True) -> int:
        """The event after which most is alive."""
        return int(self.curve(samples, accumulates=accumulates).argmax())

    def alive(self, event: int) -> np.ndarray:
        """The allocations that are alive after `event`, by their numbers."""
        there = np.zeros(len(self.fixed), dtype=np.int64)
        np.add.at(there, self.event[: event + 1], np.where(self.birth[: event + 1], 1, -1))
        return np.flatnonzero(there > 0)

    @property
    def leaves_outputs(self) -> bool:
        """Whether something that was computed outlives it, beside gradients and optimizer state."""
        made = np.setdiff1d(self.alive(len(self.event) - 1), self.event[: self.phases[1].start])
        return bool(np.isin(self.category[made], _COMPUTED).any())

    def phase_of(self, event: int) -> str:
        """The phase an event lies in."""
        return next(phase.name for phase in reversed(self.phases) if phase.start <= event)

    def span(self, name: str) -> tuple[int, int] | None:
        """First and one past last event of the first phase called `name` after the last of another kind, or None."""
        for index, phase in enumerate(self.phases):
            if phase.name == name:
                end = self.phases[index + 1].start if index + 1 < len(self.phases) else len(self.event)
                return phase.start, end
        return None

    def recomputed(self) -> tuple[str, ...]:
        """Blocks whose forward runs again in backward: the script checkpoints them itself."""
        return tuple(dict.fromkeys(v.block for v in self.visits if v.phase == "backward"))

    def growth(self, samples: int) -> int:
        """Most bytes alive during the last traced micro-batch beyond what was alive before it."""
        curve = self.curve(samples)
        start = self.window[-1]
        over = next((p.start for p in self.phases if p.name == "hand over"), len(curve))
        return int(curve[start:over].max(initial=0.0) - (curve[start - 1] if start else 0.0))

    def lifetimes(self) -> tuple[np.ndarray, np.ndarray]:
        """(birth event, death event) of each allocation; the death of what survives is the number of events."""
        born = np.full(len(self.fixed), len(self.event))
        died = np.full(len(self.fixed), len(self.event))
        order = np.arange(len(self.event))
        born[self.event[self.birth]] = order[self.birth]
        died[self.event[~self.birth]] = order[~self.birth]
        return born, died


def fit(small: Timeline, few: int, large: Timeline, many: int) -> Timeline | None:
    """One timeline for every micro-batch size from two traced ones, or None where they do not run the same way.

    In the arguments all bytes are `fixed`; in the result they are `fixed + per_sample * samples`.
    """
    if not same_course(small, large):
        return None
    per_sample = (large.fixed - small.fixed) / (many - few)
    operations = fit_operations(small.operations, few, large.operations, many)
    return replace(small, fixed=small.fixed - per_sample * few, per_sample=per_sample, operations=operations)


def split_like(traced: Timeline, samples: int, like: Timeline) -> Timeline | None:
    """A timeline for every size from one traced at `samples`, if it runs like one that is known for every size: bytes are
    fixed or per sample where they are there, and shared out in the same ratio where both; None where it runs otherwise."""
    if not same_course(traced, like):
        return None
    whole = like.fixed + like.per_sample * samples
    per_sample = np.where(whole > 0, like.per_sample * samples / np.where(whole > 0, whole, 1.0), 1.0)
    growing = traced.fixed * per_sample
    return replace(traced, fixed=traced.fixed - growing, per_sample=growing / samples)


def same_course(a: Timeline, b: Timeline) -> bool:
    """Whether two timelines allocate and free in the same order, whatever the sizes."""
    return (
        len(a.event) == len(b.event)
        and bool((a.event == b.event).all())
        and bool((a.birth == b.birth).all())
        and bool((a.category == b.category).all())
    )
