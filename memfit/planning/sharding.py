"""Chooses a sharding level: computes the bytes that each level leaves on one rank, and the first level that leaves room.

Covers only memory that does not depend on the micro-batch. Activations come on top and are planned afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("off", "optimizer", "gradients", "parameters")
"""Sharding levels (ZeRO stages 0 to 3): each shards more than the one before, and communicates more."""
SLACK = 1.1
"""Factor on the static memory that leaves room for the smallest micro-batch."""


@dataclass(frozen=True)
class Standing:
    """Static memory of a training, in bytes: what does not depend on the micro-batch."""

    parameters: int
    """Bytes of parameters and buffers."""
    gradients: int
    """Bytes of gradients."""
    state: int
    """Bytes of the optimizer's state."""
    gathered: int
    """Bytes of parameters and gradients gathered or in flight at once, where each unit is gathered while it computes."""
    gathered_whole: int
    """The same where all parameters stay gathered from the first forward to the end of backward."""
    part: float
    """The largest fraction of the optimizer's state on one rank where it is sharded: no parameter's state is split."""
    processes: int
    """The number of ranks (the world size)."""

    def at(self, level: str) -> int:
        """Return the bytes on one rank at this sharding level."""
        if level == "off":
            return self.parameters + self.gradients + self.state
        if level == "optimizer":
            return self.parameters + self.gradients + int(self.state * self.part)
        sharded = (self.parameters + self.gradients + self.state) // self.processes
        return sharded + (self.gathered_whole if level == "gradients" else self.gathered)


def least_shard(standing: Standing, room: int) -> str:
    """Return the lowest sharding level that leaves room for a micro-batch, or the highest level if none does."""
    return next((level for level in LEVELS if standing.at(level) * SLACK <= room), LEVELS[-1])


def levels_from(first: str, asked: str) -> tuple[str, ...]:
    """Return the sharding levels to try, in order: `asked`, or for "auto" `first` and all above it."""
    return LEVELS[LEVELS.index(first) :] if asked == "auto" else (asked,)
