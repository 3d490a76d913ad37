"""What processes say to each other: every exchange begins with a frame of one size, whatever it is about.

So processes that are at different places of a script, or one that has failed, are understood by all instead of waited for.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from memfit.ranks.launched import Launched

FRAME = 64
"""Numbers in a frame: what models of up to a thousand parameters agree on in a step fits in."""
HEAD = 3


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
        self._last: Launched | None = None

    def told(self, want: int, doing: str, numbers: Sequence[float] = (), patience: timedelta | None = None) -> list[Told]:
        """What every process says, by rank. Raises RuntimeError where one cannot be reached (within `patience`)."""
        frame = [float(want), float(zlib.crc32(doing.encode())), float(len(numbers)), *numbers]
        found = self._frames(frame[:FRAME], FRAME, patience)
        most = HEAD + max(int(each[2]) for each in found)
        if most > FRAME:
            rest = self._frames(frame[FRAME:], most - FRAME, patience)
            found = [first + more for first, more in zip(found, rest)]
        return [Told(int(each[0]), int(each[1]), each[HEAD : HEAD + int(each[2])]) for each in found]

    def objects(self, value: Any) -> list[Any]:
        """What every process gives, by rank; any picklable value."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self.gathered(torch.tensor([len(mine)]), None)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = self.gathered(padded, None)
        return [pickle.loads(each[:size].numpy().tobytes()) for each, size in zip(found, sizes)]

    def settle(self) -> None:
        """Return once the last exchange is over for the threads of the group, too: before Python ends. (Waiting for that in
        every exchange would take another 60 us.)"""
        last, self._last = self._last, None
        if last is not None:
            last.settle()

    def close(self) -> None:
        """End the threads of the group, which nothing is under way in."""
        talk, self.talk = self.talk, None
        dist.destroy_process_group(talk)

    def _frames(self, mine: list[float], size: int, patience: timedelta | None) -> list[list[float]]:
        sent = torch.tensor(mine + [0.0] * (size - len(mine)), dtype=torch.float64)
        return [each.tolist() for each in self.gathered(sent, patience)]

    def gathered(self, sent: torch.Tensor, patience: timedelta | None) -> list[torch.Tensor]:
        """This tensor of every process, by rank; it is as long everywhere."""
        self.settle()
        found = list(torch.empty((self.size, len(sent)), dtype=sent.dtype).unbind())
        launched = Launched(
            lambda own: dist.all_gather(list(own[1:]), own[0], group=self.talk, async_op=True), [sent, *found]
        )
        launched.wait(patience)
        self._last = launched
        return found
