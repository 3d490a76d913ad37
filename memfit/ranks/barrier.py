"""Patches `dist.barrier()` while state is sharded: a rank helps the others with their requests before it waits for them.

Scripts write `if rank == 0: torch.save(model.state_dict())` followed by a barrier. The saving rank needs the other ranks, and
these would already wait in the barrier. Not covered: a `barrier` imported by name earlier, and the script's other
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from memfit.ranks.ranks import Ranks

WAITING = "a barrier of the script's"


def helping(ranks: Ranks) -> Callable[[], None]:
    """Make barriers over all `ranks` help the others first. Returns a function that undoes it."""
    plain = dist.barrier

    def barrier(group: Any = None, *arguments: Any, **named: Any) -> Any:
        if group is None or group is dist.group.WORLD or group is ranks.group:
            ranks.meet(WAITING)
        return plain(group, *arguments, **named)

    def undo() -> None:
        if dist.barrier is barrier:
            dist.barrier = plain

    dist.barrier = barrier
    return undo
