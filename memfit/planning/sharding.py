"""How much of a model's bytes each level of sharding leaves on one process, and the first level that leaves room.

Only what is there whatever the micro-batch is: activations come on top, and are planned for afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("off", "optimizer", "gradients", "parameters")
"""Each holds more in parts than the one before, and sends more between processes."""
SLACK = 1.1
"""What else has to find room besides: a micro-batch of the smallest size, as a share of what stands."""


@dataclass(frozen=True)
class Standing:
    """Bytes that a training holds whatever the micro-batch."""

    parameters: int
    """Of parameters and buffers."""
    gradients: int
    """Of gradients."""
    state: int
    """Of the optimizer's state."""
    largest: int
    """Of the parameters that are gathered at once where they are held in parts: the largest block's."""
    part: float
    """The largest part of the optimizer's state that a process holds where it is sharded: parameters are not divided."""
    processes: int
    """How many train together."""

    def at(self, level: str) -> int:
        """Bytes on one process."""
        if level == "off":
            return self.parameters + self.gradients + self.state
        if level == "optimizer":
            return self.parameters + self.gradients + int(self.state * self.part)
        everything = (self.parameters + self.gradients + self.state) // self.processes
        if level == "gradients":  # parameters are there as a whole from the first forward to the end of backward
            return everything + self.parameters + self.largest
        return everything + 2 * self.largest


def least_shard(standing: Standing, room: int) -> str:
    """The first level that leaves room for anything else; the last one where none does."""
    return next((level for level in LEVELS if standing.at(level) * SLACK <= room), LEVELS[-1])


def levels_from(first: str, asked: str) -> tuple[str, ...]:
    """The levels to try in order: the one that was asked for, or all from the first on that may fit."""
    return LEVELS[LEVELS.index(first) :] if asked == "auto" else (asked,)
