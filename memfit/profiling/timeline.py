"""The allocations of one training step as arrays: when each is allocated and freed, its bytes per sample, and its purpose.

Pure values over numpy; nothing here imports torch. Not covered: memory outside tensor storages (scratch inside kernels,
overhead of the allocator); `allocator.py` adds what is known of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memfit.profiling.operations import Operations, fit_operations

CATEGORIES = ("parameters", "buffers", "input", "gradients", "optimizer", "kept", "transient", "other")
"""What an allocation is for: kept is saved for backward; transient is allocated and freed while computing."""
_COMPUTED = [CATEGORIES.index(name) for name in ("kept", "transient", "other")]


@dataclass(frozen=True)
class Phase:
    """A phase of the step."""

    name: str
    """present, input, forward, backward, hand over, clip, optimizer; or evaluation."""
    start: int
    """Its first event."""


@dataclass(frozen=True)
class Visit:
    """One run through the forward of a block."""

    block: str
    """The block's name."""
    start: int
    """Its first event."""
    stop: int
    """One past its last event."""
    phase: str
    """forward; or backward, where the script's own activation checkpointing recomputes."""
    inputs: tuple[int, ...]
    """Allocations of its inputs."""
    outputs: tuple[int, ...]
    """Allocations of its outputs."""


@dataclass(frozen=True)
class Timeline:
    """Allocations of one optimizer step in steady state, and the order of their births (allocation) and deaths (free)."""

    fixed: np.ndarray
    """Bytes of each allocation that do not depend on the micro-batch (float64)."""
    per_sample: np.ndarray
    """Bytes of each allocation per sample of the micro-batch (float64)."""
    category: np.ndarray
    """Index into CATEGORIES for each allocation (int8)."""
    owner: np.ndarray
    """Index into `owners` for each allocation (int32)."""
    event: np.ndarray
    """The allocation that each event concerns (int32), in order of time."""
    birth: np.ndarray
    """Whether the event is a birth (bool); otherwise a death."""
    owners: tuple[str, ...]
    """Names of the modules that allocate; "" outside any module."""
    phases: tuple[Phase, ...]
    """In order; the first starts at event 0 with what exists before the step."""
    window: tuple[int, ...] = ()
    """First event of each traced micro-batch."""
    visits: tuple[Visit, ...] = ()
    """Runs through blocks, in order."""
    operations: Operations | None = None
    """What the step computes, if recorded."""
    operation: np.ndarray | None = None
    """Index into `operation_names` for each allocation (int32): the operation that created it; None if not recorded."""
    operation_names: tuple[str, ...] = ()
    """Names of operations that create storages; "" for storages that existed before the first."""

    def sizes(self, samples: int) -> np.ndarray:
        """Returns the bytes of each allocation at a micro-batch of `samples`."""
        return np.maximum(self.fixed + self.per_sample * samples, 0.0)

    def curve(self, samples: int, *, accumulates: bool = True) -> np.ndarray:
        """Returns the bytes alive after each event. With `accumulates=False` (one micro-batch), the second's events count 0."""
        size = self.sizes(samples)[self.event]
        curve = np.cumsum(np.where(self.birth, size, -size))
        if not accumulates and len(self.window) > 1:
            # The second micro-batch frees all it allocates: without it, the rest of the step is the same.
            over = next((p.start for p in self.phases if p.name == "hand over"), len(curve))
            curve[self.window[1] : over] = 0.0
        return curve

    def peak(self, samples: int, *, accumulates: bool = True) -> int:
        """Returns the most bytes alive at the same time at a micro-batch of `samples`. With `accumulates=False` the step has a
        single micro-batch, so gradients only come into existence during it."""
        return int(self.curve(samples, accumulates=accumulates).max(initial=0.0))

    def at(self, event: int, samples: int) -> dict[str, int]:
        """Returns the bytes alive after `event`, by category."""
        weights = np.where(self.birth[: event + 1], 1.0, -1.0) * self.sizes(samples)[self.event[: event + 1]]
        sums = np.bincount(self.category[self.event[: event + 1]], weights=weights, minlength=len(CATEGORIES))
        return {name: int(size) for name, size in zip(CATEGORIES, sums) if size > 0.5}

    def peak_event(self, samples: int, *, accumulates: bool = True) -> int:
        """Returns the event after which the most bytes are alive."""
        return int(self.curve(samples, accumulates=accumulates).argmax())

    def alive(self, event: int) -> np.ndarray:
        """Returns the indices of the allocations that are alive after `event`."""
        there = np.zeros(len(self.fixed), dtype=np.int64)
        np.add.at(there, self.event[: event + 1], np.where(self.birth[: event + 1], 1, -1))
        return np.flatnonzero(there > 0)

    @property
    def leaves_outputs(self) -> bool:
        """Whether a computed tensor survives the recording, besides gradients and optimizer state."""
        made = np.setdiff1d(self.alive(len(self.event) - 1), self.event[: self.phases[1].start])
        return bool(np.isin(self.category[made], _COMPUTED).any())

    def phase_of(self, event: int) -> str:
        """Returns the name of the phase that an event lies in."""
        return next(phase.name for phase in reversed(self.phases) if phase.start <= event)

    def span(self, name: str) -> tuple[int, int] | None:
        """Returns the first event, and one past the last event, of the first phase called `name`; None without such a phase."""
        for index, phase in enumerate(self.phases):
            if phase.name == name:
                end = self.phases[index + 1].start if index + 1 < len(self.phases) else len(self.event)
                return phase.start, end
        return None

    def recomputed(self) -> tuple[str, ...]:
        """Returns the blocks whose forward runs again in backward: the script checkpoints them itself."""
        return tuple(dict.fromkeys(v.block for v in self.visits if v.phase == "backward"))

    def growth(self, samples: int) -> int:
        """Returns the most bytes alive during the last traced micro-batch, beyond those alive before it."""
        curve = self.curve(samples)
        start = self.window[-1]
        over = next((p.start for p in self.phases if p.name == "hand over"), len(curve))
        return int(curve[start:over].max(initial=0.0) - (curve[start - 1] if start else 0.0))

    def lifetimes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (birth event, death event) of each allocation; the death of a survivor is the number of events."""
        born = np.full(len(self.fixed), len(self.event))
        died = np.full(len(self.fixed), len(self.event))
        order = np.arange(len(self.event))
        born[self.event[self.birth]] = order[self.birth]
        died[self.event[~self.birth]] = order[~self.birth]
        return born, died


def fit(small: Timeline, few: int, large: Timeline, many: int) -> Timeline | None:
    """Fits one timeline for every micro-batch size to two traced ones; None where these do not run the same way.

    All bytes of the arguments are `fixed`; those of the result are `fixed + per_sample * samples`.
    """
    if not same_course(small, large):
        return None
    per_sample = (large.fixed - small.fixed) / (many - few)
    operations = fit_operations(small.operations, few, large.operations, many)
    return replace(small, fixed=small.fixed - per_sample * few, per_sample=per_sample, operations=operations)


def split_like(traced: Timeline, samples: int, like: Timeline) -> Timeline | None:
    """Returns a timeline for every size from one traced at `samples`, if it runs like one that is known for every size. Bytes
    are fixed or per sample as in `like`, and split in its ratio where they are both. None if the two run differently."""
    if not same_course(traced, like):
        return None
    whole = like.fixed + like.per_sample * samples
    per_sample = np.where(whole > 0, like.per_sample * samples / np.where(whole > 0, whole, 1.0), 1.0)
    growing = traced.fixed * per_sample
    return replace(traced, fixed=traced.fixed - growing, per_sample=growing / samples)


def same_course(a: Timeline, b: Timeline) -> bool:
    """Whether two timelines allocate and free in the same order, regardless of sizes."""
    return (
        len(a.event) == len(b.event)
        and bool((a.event == b.event).all())
        and bool((a.birth == b.birth).all())
        and bool((a.category == b.category).all())
    )
