"""Exchanges messages between ranks. Every exchange begins with a frame of fixed size, whatever it is about.

So a rank that is elsewhere in the script, or has failed, can tell the others, and nobody hangs in a mismatched collective.
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
"""Numbers in a frame. What the ranks agree on in a step fits, for models of up to a thousand parameters."""
HEAD = 3


@dataclass(frozen=True)
class Told:
    """The message of one rank."""

    want: int
    """Its request to the others, as a code (`ranks.NOTHING` and the like)."""
    place: int
    """A checksum of what it is about to do."""
    numbers: list[float]
    """The payload."""


class Exchange:
    """Exchanges messages over the gloo group `talk` of `size` ranks."""

    def __init__(self, talk: Any, size: int) -> None:
        self.talk, self.size = talk, size
        self._last: Launched | None = None

    def told(self, want: int, doing: str, numbers: Sequence[float] = (), patience: timedelta | None = None) -> list[Told]:
        """Gather every rank's message, by rank. Raises RuntimeError if a rank cannot be reached (within `patience`)."""
        frame = [float(want), float(zlib.crc32(doing.encode())), float(len(numbers)), *numbers]
        found = self._frames(frame[:FRAME], FRAME, patience)
        most = HEAD + max(int(each[2]) for each in found)
        if most > FRAME:
            rest = self._frames(frame[FRAME:], most - FRAME, patience)
            found = [first + more for first, more in zip(found, rest)]
        return [Told(int(each[0]), int(each[1]), each[HEAD : HEAD + int(each[2])]) for each in found]

    def objects(self, value: Any) -> list[Any]:
        """Gather a picklable value from every rank, by rank."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self.gathered(torch.tensor([len(mine)]), None)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = self.gathered(padded, None)
        return [pickle.loads(each[:size].numpy().tobytes()) for each, size in zip(found, sizes)]

    def settle(self) -> None:
        """Wait until the group's threads have finished the last exchange too. Needed before Python exits. (Waiting for this in
        every exchange would add 60 us.)"""
        last, self._last = self._last, None
        if last is not None:
            last.settle()

    def close(self) -> None:
        """Shut down the group's threads. Nothing may be in flight."""
        talk, self.talk = self.talk, None
        dist.destroy_process_group(talk)

    def _frames(self, mine: list[float], size: int, patience: timedelta | None) -> list[list[float]]:
        sent = torch.tensor(mine + [0.0] * (size - len(mine)), dtype=torch.float64)
        return [each.tolist() for each in self.gathered(sent, patience)]

    def gathered(self, sent: torch.Tensor, patience: timedelta | None) -> list[torch.Tensor]:
        """All-gather a tensor, by rank. Its length is the same on every rank."""
        self.settle()
        found = list(torch.empty((self.size, len(sent)), dtype=sent.dtype).unbind())
        launched = Launched(
            lambda own: dist.all_gather(list(own[1:]), own[0], group=self.talk, async_op=True), [sent, *found]
        )
        launched.wait(patience)
        self._last = launched
        return found
