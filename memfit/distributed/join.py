"""Starts a training over several ranks: they compare what each was given, and start from the same parameters.

Not covered: optimizer state that differs between ranks (one of them resumed and the others did not).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import RankFailed, UsageError
from memfit.hardware.driver import identity
from memfit.ranks.ranks import Ranks
from memfit.tracing.build_profile import model_facts

WRAPPING = "memfit.wrap"


@contextmanager
def beginning(ranks: Ranks | None) -> Iterator[None]:
    """Context manager in which a failure on one rank fails all `ranks`: the others raise RankFailed on exit."""
    if ranks is None:
        yield
        return
    try:
        yield
    except RankFailed:
        raise
    except BaseException as error:
        ranks.failed(error)
        raise
    ranks.gather("wrapped", WRAPPING)


def agree_to_begin(
    ranks: Ranks, model: nn.Module, optimizer: Optimizer, loader: Any, *, target_batch: int | None, **asked: Any
) -> None:
    """Check that all ranks were given the same, and broadcast rank 0's parameters. Raises UsageError on every rank."""
    check_share(ranks, target_batch)
    check_alike(ranks, model, optimizer, loader, target_batch=target_batch, **asked)
    start_alike(ranks, model)


def check_alike(ranks: Ranks, model: nn.Module, optimizer: Optimizer, loader: Any, **asked: Any) -> None:
    """Raise UsageError on every rank if they were not given the same model, loader and arguments."""
    facts = model_facts(model, optimizer)
    mine = {
        "model and optimizer": f"{facts.name} with {facts.optimizer} ({facts.parameters} parameters, {facts.fingerprint[:8]})",
        "samples in the loader": str(_samples(loader)),
        **{name: str(value) for name, value in asked.items()},
    }
    told: list[dict[str, str]] = ranks.gather(mine, WRAPPING)
    for name in mine:
        found = [each.get(name) for each in told]
        if len(set(found)) > 1:
            by_rank = ", ".join(f"{value} on rank {i}" for i, value in enumerate(found))
            raise UsageError(
                f"training over {ranks.size} processes",
                found=f"they differ in {name}: {by_rank}",
                next_move="build the model, the loader and the call of memfit.wrap alike on every process",
            )


def start_alike(ranks: Ranks, model: nn.Module) -> None:
    """Broadcast parameters and buffers from rank 0, as DistributedDataParallel does."""
    for tensor in (*model.parameters(), *model.buffers()):
        held = tensor.data
        if held.is_contiguous():
            ranks.from_first([held])
        else:
            sent = held.contiguous()
            ranks.from_first([sent])
            held.copy_(sent)


def beside(ranks: Ranks, device: torch.device) -> int:
    """Return how many ranks train on this rank's device, itself included."""
    mine = (socket.gethostname(), _boot(), device.type, identity(device))
    return ranks.gather(mine, WRAPPING).count(mine)


def _boot() -> str:
    """Return what tells machines of the same name apart, if the system has it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def check_share(ranks: Ranks, target_batch: int | None) -> None:
    """Raise UsageError unless every rank gets at least one sample of each effective batch."""
    if target_batch is not None and target_batch < ranks.size:
        processes = "one process" if target_batch == 1 else f"{target_batch} processes"
        raise UsageError(
            f"target_batch={target_batch}",
            found=f"{ranks.size} processes train together, and each needs a sample of every effective batch",
            next_move=f"ask for target_batch={ranks.size} or more, or start {processes}",
        )


def _samples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None
