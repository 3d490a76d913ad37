"""The world: launcher variables by hand, and a real process group."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from memfit.hardware.world import World, world

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
ALONE = World(rank=0, size=1, local_rank=0, launcher="none")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, ALONE, id="nothing"),
        pytest.param(TORCHRUN, World(5, 8, 1, "torchrun"), id="torchrun"),
        pytest.param(TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, World(5, 8, 1, "accelerate"), id="accelerate"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, World(0, 2, 0, "environment"), id="by hand"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1, 0, "environment"), id="one by hand"),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            World(2, 4, 2, "mpi"),
            id="Open MPI",
        ),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, World(1, 2, 1, "mpi"), id="MPICH"),
        pytest.param(SLURM, World(3, 4, 1, "slurm"), id="srun"),
        pytest.param(SLURM | {"SLURM_PROCID": "0"}, World(0, 4, 1, "slurm"), id="srun, first task"),
        pytest.param(SLURM | TORCHRUN, World(5, 8, 1, "torchrun"), id="torchrun inside srun"),
        pytest.param(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ALONE, id="srun with one task"),
        pytest.param({"SLURM_NTASKS": "4"}, ALONE, id="salloc, no task"),
        pytest.param({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ALONE, id="batch script itself"),
        pytest.param({"WORLD_SIZE": "4"}, ALONE, id="no rank"),
        pytest.param({"RANK": "1"}, ALONE, id="no size"),
        pytest.param({"RANK": "x", "WORLD_SIZE": "4"}, ALONE, id="rank no number"),
        pytest.param({"RANK": "4", "WORLD_SIZE": "4"}, ALONE, id="rank beyond the size"),
        pytest.param({"RANK": "-1", "WORLD_SIZE": "4"}, ALONE, id="negative rank"),
        pytest.param(TORCHRUN | {"LOCAL_RANK": ""}, World(5, 8, 0, "torchrun"), id="no local rank"),
    ],
)
def test_launchers(environ: dict[str, str], expected: World) -> None:
    assert world(environ) == expected


def test_the_real_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert world().size == 2


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed part")
def test_an_initialised_group_counts_before_the_environment(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        assert world(TORCHRUN) == World(0, 1, 1, "torch.distributed")
        assert world({}) == World(0, 1, 0, "torch.distributed")
    finally:
        dist.destroy_process_group()
    assert world({}) == ALONE
