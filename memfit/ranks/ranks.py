"""The processes of one training, seen from one of them: what they tell each other, and sums over all.

What is agreed on goes over a gloo group of its own, apart from gradients: there a process that failed can still tell the
others, whatever its device is doing. Every exchange carries whether its sender failed, so that nobody waits for a process that
has given up. Not covered: a process that hangs without failing; the group's own time limit ends that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from memfit._errors import MemfitError, RankFailed

FAREWELL = timedelta(seconds=30)
"""How long a process that failed waits for the others to hear of it before it raises its own error."""


@dataclass(frozen=True)
class _Failed:
    """What a process that failed says instead of what was asked."""

    text: str
    """Its error, in a line."""


class Ranks:
    """All processes of a training; `rank` is this one, `size` how many there are.

    Attribute `group`: the process group that gradients are reduced over.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device, self.group = device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = None if group is None else dist.get_process_group_ranks(group)
        self._talk = dist.new_group(members, backend="gloo")

    def gather(self, value: Any, doing: str) -> list[Any]:
        """What every process gives, by rank; any picklable value. Raises RankFailed where one failed or is gone."""
        try:
            found = self._all_gather(value)
        except RuntimeError as error:
            raise self._lost(doing) from error
        return self._heard(found, doing)

    def agree(self, numbers: Sequence[float], doing: str) -> list[list[float]]:
        """As `gather` for the same count of numbers everywhere, in a single small exchange."""
        mine = torch.tensor([0.0, *numbers], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(found, mine, group=self._talk)
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
        said = _Failed(_in_a_line(error))
        try:
            if numbers is not None:
                mine = torch.tensor([1.0] + [0.0] * numbers, dtype=torch.float64)
                found = [torch.empty_like(mine) for _ in range(self.size)]
                work = dist.all_gather(found, mine, group=self._talk, async_op=True)
                work.wait(FAREWELL)  # type: ignore[union-attr]
            self._all_gather(said)
        except RuntimeError:
            return  # the others are gone, too

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
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        pending = [dist.broadcast(tensor, first, group=self.group, async_op=True) for tensor in tensors]
        for work in pending:
            work.wait()  # type: ignore[union-attr]

    def _all_gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._talk)
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


def _in_a_line(error: BaseException) -> str:
    """An error as the other processes show it: of memfit's own also what was found, with that process's numbers."""
    kind, text = type(error).__name__, (str(error).splitlines() or [""])[0]
    if isinstance(error, MemfitError):
        text = f"{error.asked}: {error.found}"
    return f"{kind}: {text}" if text else kind
