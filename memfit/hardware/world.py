"""Reads the rank and the world size from the launcher or torch.distributed.

Not covered: whether memfit supports them (the caller decides), and launchers that pass them as arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Describes this process's place among the ranks of one training; a single process is a world of size 1."""

    rank: int
    """This process's rank, from 0."""
    size: int
    """Number of processes."""
    local_rank: int
    """This process's rank on its machine, from 0."""
    launcher: str
    """Source of these values: "torch.distributed", "accelerate", "torchrun", "environment", "mpi", "slurm", or "none"."""


def world(environ: Mapping[str, str] = os.environ) -> World:
    """Return this process's world. An initialized torch.distributed process group takes precedence over the launcher.

    Variables that are not numbers or contradict each other count as unset.
    """
    return _by_group(environ) or _by_launcher(environ) or World(0, 1, 0, "none")


# Rank, size and local rank by launcher; the first complete set counts. PMI is what MPICH and Intel MPI set.
_VARIABLES = (
    ("environment", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpi", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def _by_launcher(environ: Mapping[str, str]) -> World | None:
    for launcher, rank, size, local in _VARIABLES:
        found = _number(environ, rank), _number(environ, size)
        if found[0] is None or found[1] is None or found[0] >= found[1]:
            continue
        if launcher == "slurm" and not _is_slurm_task(environ):
            continue
        return World(found[0], found[1], _number(environ, local) or 0, _name(launcher, environ))
    return None


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several.

    The batch script itself also sees the job's SLURM_NTASKS, with SLURM_PROCID 0, but runs once and outside any step.
    """
    if (_number(environ, "SLURM_NTASKS") or 0) < 2:
        return False
    return _number(environ, "SLURM_PROCID") != 0 or "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ


def _name(launcher: str, environ: Mapping[str, str]) -> str:
    """Return the launcher behind RANK and WORLD_SIZE, by its other variables (accelerate sets torchrun's variables too)."""
    if launcher != "environment":
        return launcher
    if any(name.startswith("ACCELERATE_") for name in environ):
        return "accelerate"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"


def _by_group(environ: Mapping[str, str]) -> World | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    told = _by_launcher(environ)
    return World(dist.get_rank(), dist.get_world_size(), told.local_rank if told else 0, "torch.distributed")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None
