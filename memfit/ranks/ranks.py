"""The processes of one training, seen from one of them: what they tell each other, and sums over all.

What is agreed on goes over a gloo group of its own, apart from gradients: there a process that failed can still tell the
others, whatever its device is doing. Every exchange carries whether its sender failed, so that nobody waits for a process that
has given up. Where something is held in parts, a process may ask for what takes all of them (a whole state dict, on rank 0
alone): the others come to its help at their next exchange, whatever that is about. Not covered: a process that hangs without
failing; the group's own time limit ends that.
"""

from __future__ import annotations

import atexit
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from memfit._errors import RankFailed
from memfit.ranks.passes import PASSES, Passes

FAREWELL = timedelta(seconds=30)
"""How long a process that failed waits for the others to hear of it before it raises its own error."""
NOTHING, FAILED, ENDED = 0, -1, -2
"""What a process wants of the others beside their exchange; a service, where it is above zero."""
Service = Callable[[Sequence[int]], None]
"""What all processes do for those (ranks) that ask for it."""


@dataclass(frozen=True)
class _Failed:
    """What a process that failed says instead of what was asked."""

    text: str
    """Its error, in a line."""


class Ranks:
    """All processes of a training; `rank` is this one, `size` how many there are.

    Attributes: `group` (the process group that gradients are reduced over), `talk` (that of what is agreed on).
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device, self.group = device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = None if group is None else dist.get_process_group_ranks(group)
        self.talk: Any = dist.new_group(members, backend="gloo")
        self._services: list[Service] = []
        self._passes: Passes | None = None
        self._over = False

    def gather(self, value: Any, doing: str) -> list[Any]:
        """What every process gives, by rank; any picklable value. Raises RankFailed where one failed or is gone."""
        self.meet(doing)
        try:
            found = self._all_gather(value)
        except RuntimeError as error:
            raise self._lost(doing) from error
        return self._heard(found, doing)

    def agree(self, numbers: Sequence[float], doing: str) -> list[list[float]]:
        """As `gather` for the same count of numbers everywhere, in a single small exchange."""
        self.meet(doing)
        mine = torch.tensor([0.0, *numbers], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(found, mine, group=self.talk)
        except RuntimeError as error:
            raise self._lost(doing) from error
        told = [each.tolist() for each in found]
        if any(each[0] for each in told):
            self._heard(self._all_gather(None), doing)
        return [each[1:] for each in told]

    def failed(self, error: BaseException, numbers: int | None = None) -> None:
        """Let the others know that this process fails, where they are about to `agree` on so many numbers, or to `gather`."""
        if getattr(error, "_memfit_said", False):
            return
        error._memfit_said = True  # type: ignore[attr-defined]
        text = (str(error).splitlines() or [""])[0]
        said = _Failed(f"{type(error).__name__}: {text}" if text else type(error).__name__)
        try:
            if self._services:
                self._over = True
                self._told(FAILED, patience=FAREWELL)
            elif numbers is not None:
                mine = torch.tensor([1.0] + [0.0] * numbers, dtype=torch.float64)
                found = [torch.empty_like(mine) for _ in range(self.size)]
                work = dist.all_gather(found, mine, group=self.talk, async_op=True)
                work.wait(FAREWELL)  # type: ignore[union-attr]
            self._all_gather(said)
        except RuntimeError:
            return  # the others are gone, too

    def serve(self, service: Service) -> int:
        """From now on a process may `ask` for this; every process registers the same, in the same order. Returns what to ask
        by. Processes that end go on serving until all do."""
        if not self._services:
            atexit.register(_end, weakref.ref(self))
        self._services.append(service)
        return len(self._services)

    def ask(self, service: int, doing: str) -> None:
        """Have all processes do this, once they come to their next exchange. Raises RankFailed where one failed or is gone."""
        self.meet(doing, service)

    def meet(self, doing: str, want: int = NOTHING) -> None:
        """Before an exchange: do what other processes ask for, until none does; or ask for something oneself."""
        if want and self._over:
            raise self._lost(doing)
        while self._services and not self._over:
            told = self._heard_out(want, doing)
            codes = [code for code, _ in told]
            served = self._serve(codes)
            if want in served or not any(code > 0 for code in codes):
                self._check_together(told, doing)
                return

    def pass_along(self, passes: Passes) -> None:
        """From now on passes take all processes."""
        self._passes = passes

    def end(self) -> None:
        """This process has done all it does; it helps the others until they have, too."""
        try:
            while self._services and not self._over and dist.is_initialized():
                if not self._serve([code for code, _ in self._told(ENDED)]):
                    return  # the others have ended as well; or they want another step, and learn that there is none
        except RuntimeError:
            return  # the others are gone

    def _serve(self, codes: Sequence[int]) -> set[int]:
        """Do what is asked for; returns what was done: all services, and one pass."""
        asked = {code for code in codes if 0 < code < PASSES}
        for code in sorted(asked):
            self._services[code - 1]([rank for rank, wanted in enumerate(codes) if wanted == code])
        chosen = 0 if self._passes is None else self._passes.chosen(codes)
        if chosen and self._passes is not None:
            self._passes.do(chosen, codes[self.rank] == chosen)
        return asked | ({chosen} if chosen else set())

    def _heard_out(self, want: int, doing: str) -> list[tuple[int, int]]:
        try:
            told = self._told(want, doing)
        except RuntimeError as error:
            raise self._lost(doing) from error
        if any(code == FAILED for code, _ in told):
            self._over = True
            self._heard(self._all_gather(None), doing)
        return told

    def _check_together(self, told: Sequence[tuple[int, int]], doing: str) -> None:
        """Raise RankFailed where nobody asks for anything, and the processes are about to exchange different things."""
        codes = [code for code, _ in told]
        if any(code > 0 for code in codes):
            return
        if ENDED in codes:
            raise self._apart(doing, f"rank {_listed(codes, ENDED)} has come to the end of its script")
        if len({about for _, about in told}) > 1:
            mine = told[self.rank][1]
            other = ", ".join(str(rank) for rank, (_, about) in enumerate(told) if about != mine)
            raise self._apart(doing, f"rank {other} is at another place of the script")

    def _told(self, want: int, doing: str = "", patience: timedelta | None = None) -> list[tuple[int, int]]:
        """(what it wants of the others, a number for what it is about to exchange), of every process."""
        mine = torch.tensor([want, zlib.crc32(doing.encode())])
        found = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(found, mine, group=self.talk, async_op=True)
        work.wait() if patience is None else work.wait(patience)  # type: ignore[union-attr]
        return [(int(code), int(about)) for code, about in found]

    def _apart(self, doing: str, found: str) -> RankFailed:
        self._over = True
        return RankFailed(
            f"{doing} over {self.size} processes",
            found=found,
            next_move="let every process do the same number of steps, and leave the training together",
        )

    def everywhere(self, rank: int) -> int:
        """The number of one of these processes among all that there are."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor (dense, contiguous) summed over all processes, in place."""
        pending = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]
        for work in pending:
            work.wait()  # type: ignore[union-attr]

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        """The processes' tensors, alike but for their first dimension, one after the other by rank."""
        lengths = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(tensor)], device=tensor.device), group=self.group)
        counts = [int(length) for length in lengths]
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(found, counts)])

    def from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor as rank 0 has it, in place."""
        pending = [dist.broadcast(tensor, self.everywhere(0), group=self.group, async_op=True) for tensor in tensors]
        for work in pending:
            work.wait()  # type: ignore[union-attr]

    def _all_gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.talk)
        return found

    def _heard(self, found: list[Any], doing: str) -> list[Any]:
        failed = [(rank, said.text) for rank, said in enumerate(found) if isinstance(said, _Failed)]
        if failed:
            raise RankFailed(
                f"{doing} over {self.size} processes",
                found="; ".join(f"rank {rank} failed: {text}" for rank, text in failed),
                next_move="the traceback is in that rank's output; nothing of this step was applied on any rank",
            )
        return found

    def _lost(self, doing: str) -> RankFailed:
        return RankFailed(
            f"{doing} over {self.size} processes",
            found="another process has ended, or cannot be reached",
            next_move="its own output says why; nothing of this step was applied on this rank",
        )


def _end(ranks: weakref.ref[Ranks]) -> None:
    found = ranks()
    if found is not None:
        found.end()


def _listed(codes: Sequence[int], wanted: int) -> str:
    return ", ".join(str(rank) for rank, code in enumerate(codes) if code == wanted)
