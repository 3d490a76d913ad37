"""Joins the ranks that a launcher started, with the existing process group or a new one from the environment.

Not covered: launchers that set no rendezvous address, so that ranks cannot find each other.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from memfit._errors import UsageError
from memfit.hardware.world import World, world
from memfit.ranks.again import meeting_place
from memfit.ranks.ranks import Ranks

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


def join(device: torch.device, group: Any = None, environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Return the ranks this process trains with, or None if it trains alone. `group` is the process group of a model wrapped
    in DistributedDataParallel.

    If no process group exists, create one from the environment that `torchrun` and `accelerate launch` set (NCCL for CUDA,
    else gloo), and destroy it at exit. Raises UsageError if several processes run and cannot find each other.
    """
    here = world(environ)
    if here.size == 1 and group is None:
        _check_alone(environ)
        return None
    if not dist.is_initialized():
        _check_rendezvous(here, environ)
        place = meeting_place(here, environ)
        dist.init_process_group(_backend(device), rank=here.rank, world_size=here.size, store=place)
        atexit.register(_leave)
    if dist.get_world_size(group) == 1:
        return None
    return Ranks(device, group)


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    told = getattr(dist, "get_default_backend_for_device", None)  # torch 2.6 and later
    return told(device) if told is not None else "nccl"


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_alone(environ: Mapping[str, str]) -> None:
    asked = environ.get("WORLD_SIZE", "")
    if asked.isdigit() and int(asked) > 1:
        raise UsageError(
            f"training with WORLD_SIZE={asked}",
            found="RANK is not set, so this process does not know which of them it is",
            next_move="start the script with torchrun or accelerate launch, which set both",
        )


def _check_rendezvous(here: World, environ: Mapping[str, str]) -> None:
    missing = [name for name in RENDEZVOUS if not environ.get(name)]
    if missing:
        raise UsageError(
            f"training as process {here.rank} of {here.size} ({here.launcher})",
            found=f"{' and '.join(missing)} not set, so the processes cannot find each other",
            next_move=f"start the script with torchrun --nproc_per_node={here.size}, or set {' and '.join(RENDEZVOUS)}",
        )
