"""What processes say to each other: every exchange begins with a frame of one size, whatever it is about.

So processes that are at different places of a script, or one that has failed, are understood by all instead of waited for.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memfit.hardware.exhausted import patiently

FRAME = 64
"""Numbers in a frame: what models of up to a thousand parameters agree on in a step fits in."""
HEAD = 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Told:
    """What one process says."""

    want: int
    """What it wants of the others."""
    place: int
    """A number for what it is about to do."""
    numbers: list[float]
    """What goes with that."""


class Exchange:
    """Exchanges over the gloo group `talk` of `size` processes."""

    def __init__(self, talk: Any, size: int) -> None:
        self.talk, self.size = talk, size

    def told(self, want: int, doing: str, numbers: Sequence[float] = (), patience: timedelta | None = None) -> list[Told]:
        """What every process says, by rank. Raises RuntimeError where one cannot be reached (within `patience`)."""
        frame = [float(want), float(zlib.crc32(doing.encode())), float(len(numbers)), *numbers]
        found = self._gathered(frame[:FRAME], FRAME, patience)
        most = HEAD + max(int(each[2]) for each in found)
        if most > FRAME:
            rest = self._gathered(frame[FRAME:], most - FRAME, patience)
            found = [first + more for first, more in zip(found, rest)]
        return [Told(int(each[0]), int(each[1]), each[HEAD : HEAD + int(each[2])]) for each in found]

    def objects(self, value: Any) -> list[Any]:
        """What every process gives, by rank; any picklable value."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.talk)
        return found

    def close(self) -> None:
        """End the threads of the group, which nothing is under way in. One that still lets go of the tensors of its last
        exchange when Python ends takes the process down (pytorch/pytorch#190489, in torch 2.13)."""
        talk, self.talk = self.talk, None
        dist.destroy_process_group(talk)

    def _gathered(self, mine: list[float], size: int, patience: timedelta | None) -> list[list[float]]:
        sent = torch.tensor(mine + [0.0] * (size - len(mine)), dtype=torch.float64)
        found = list(torch.empty((self.size, size), dtype=torch.float64).unbind())
        launch = partial(dist.all_gather, found, sent, group=self.talk, async_op=True)
        work: Any = patiently(launch, CPU)
        work.wait() if patience is None else work.wait(patience)
        return [each.tolist() for each in found]
