"""The operations of one training step as arrays: FLOPs and memory traffic of each, and the module it runs for.

Pure values over numpy; nothing here imports torch. Not covered: caches, the order in which a device overlaps operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Operations:
    """The operations of one traced step, in order of time."""

    flops: np.ndarray
    """FLOPs of each operation that do not depend on the micro-batch (float64); multiply and add count as two."""
    flops_per_sample: np.ndarray
    """FLOPs of each operation per sample of the micro-batch (float64)."""
    moved: np.ndarray
    """Bytes each operation reads and writes that do not depend on the micro-batch (float64)."""
    moved_per_sample: np.ndarray
    """Bytes each operation reads and writes per sample of the micro-batch (float64)."""
    event: np.ndarray
    """The next event of the timeline when each operation began (int32)."""
    owner: np.ndarray
    """Index into `owners` for each operation (int32)."""
    kind: np.ndarray
    """Index into `kinds` for each operation (int32)."""
    owners: tuple[str, ...]
    """Names of the modules that compute."""
    kinds: tuple[tuple[str, str], ...]
    """(operation, dtype it computes in)."""

    def flops_at(self, samples: int) -> np.ndarray:
        """Returns the FLOPs of each operation at a micro-batch of `samples`."""
        return np.maximum(self.flops + self.flops_per_sample * samples, 0.0)

    def moved_at(self, samples: int) -> np.ndarray:
        """Returns the bytes each operation reads and writes at a micro-batch of `samples`."""
        return np.maximum(self.moved + self.moved_per_sample * samples, 0.0)

    def part(self, start: int, stop: int, shift: int = 0) -> Operations:
        """Returns the operations between two events, shifted by `shift` events."""
        chosen = (self.event >= start) & (self.event < stop)
        arrays = {name: getattr(self, name)[chosen] for name in _ARRAYS}
        arrays["event"] = arrays["event"] + shift
        return replace(self, **arrays)

    def followed_by(self, other: Operations) -> Operations:
        """Returns these operations, followed by those of another recording."""
        owners = tuple(dict.fromkeys((*self.owners, *other.owners)))
        kinds = tuple(dict.fromkeys((*self.kinds, *other.kinds)))
        owner_of = np.array([owners.index(name) for name in other.owners], dtype=np.int32)
        kind_of = np.array([kinds.index(kind) for kind in other.kinds], dtype=np.int32)
        theirs = replace(other, owner=owner_of[other.owner], kind=kind_of[other.kind]) if len(other.event) else other
        joined = {name: np.concatenate([getattr(self, name), getattr(theirs, name)]) for name in _ARRAYS}
        return replace(self, owners=owners, kinds=kinds, **joined)


_ARRAYS = ("flops", "flops_per_sample", "moved", "moved_per_sample", "event", "owner", "kind")


def fit_operations(small: Operations | None, few: int, large: Operations | None, many: int) -> Operations | None:
    """Fits operations for every micro-batch size to two recordings; None where these compute different things.

    All figures of the arguments are fixed; those of the result are fixed + per sample * samples.
    """
    if small is None or large is None or len(small.event) != len(large.event):
        return None
    names = [small.kinds[k][0] for k in small.kind], [large.kinds[k][0] for k in large.kind]
    if names[0] != names[1]:
        return None
    flops = (large.flops - small.flops) / (many - few)
    moved = (large.moved - small.moved) / (many - few)
    return replace(
        small,
        flops=small.flops - flops * few,
        flops_per_sample=flops,
        moved=small.moved - moved * few,
        moved_per_sample=moved,
    )
