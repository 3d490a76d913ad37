"""A script's `dist.barrier()` while something is held in parts: processes help the others before they wait for them.

`if rank == 0: torch.save(model.state_dict())` and a barrier behind it is what scripts write; the one that saves needs the
others, who would wait in the barrier for it. Not covered: barriers imported by name before, and other collectives of the
script's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from memfit.ranks.ranks import Ranks

WAITING = "a barrier of the script's"


def helping(ranks: Ranks) -> Callable[[], None]:
    """Let barriers over all `ranks` help; returns what takes that back."""
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
