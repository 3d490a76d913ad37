"""Runs `memfit profile`: shows where the memory and the time of a training step go, module by module."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from torch.utils.data import DataLoader

from memfit import _verbs as verbs
from memfit._errors import UsageError
from memfit._values import check_count
from memfit.batches.cut import shared_samples
from memfit.cli.functions import UserTraining, made_by, split_target
from memfit.loading.pool import planning_pool
from memfit.profiling.loop import AFTER_STEP
from memfit.reporting.files import FORMATS, check_writable
from memfit.reporting.profiled import ProfileReport, profile_report
from memfit.reporting.progress import progress


@dataclass(frozen=True)
class ProfileOptions:
    """Holds the options of `memfit profile`, as typed."""

    target: str
    micro_batch: int | None
    device: str | None
    precision: str
    checkpoint: str
    depth: int
    save: Path | None
    max_grad_norm: float | None = None
    clip_grad_value: float | None = None
    zero_grad: str = AFTER_STEP
    plain_loop: bool = False
    evaluation: int | None = None


def profile_as(wanted: ProfileOptions) -> None:
    """Profile, print the result, and save it if asked for. Raises MemfitError."""
    file, function = split_target(wanted.target)
    for name, value in (("micro_batch", wanted.micro_batch), ("depth", wanted.depth)):
        if value is not None:
            check_count(name, value)
    if function is None:
        raise UsageError(
            f"profiling {wanted.target}",
            found="it names no function",
            next_move="write FILE.py:function, a function that returns (model, optimizer, loader[, loss_fn])",
        )
    save = None if wanted.save is None else wanted.save.absolute()  # the function may change the working directory
    if wanted.save is not None:
        check_writable(wanted.save, suffixes=FORMATS)
    report = _profiled(made_by(file, function), wanted)
    _show(report)
    if save is not None:
        report.save(save)
        typer.echo(f"memfit: the profile is in {wanted.save}", err=True)


def _profiled(training: UserTraining, wanted: ProfileOptions) -> ProfileReport:
    pool = planning_pool(training.loader) if isinstance(training.loader, DataLoader) else None
    sample = next(iter(training.loader), None) if pool is None else pool[0]
    if sample is None:
        raise UsageError(wanted.target, found="its loader yields nothing", next_move="return one that yields batches")
    size = wanted.micro_batch or getattr(training.loader, "batch_size", None) or shared_samples(sample)
    if size is None:
        found = "its batches do not say how many samples they have"
        raise UsageError(wanted.target, found=found, next_move="pass --micro-batch, the samples per forward")
    with progress(f"profiling {wanted.target}", None) as bar:
        bar.say("")
        found = verbs.profile(
            training.model,
            training.optimizer,
            sample,
            loss_fn=training.loss_fn,
            device=wanted.device,
            precision=wanted.precision,
            checkpoint=_blocks(wanted.checkpoint),
            max_grad_norm=wanted.max_grad_norm,
            clip_grad_value=wanted.clip_grad_value,
            zero_grad=wanted.zero_grad,
            plain_loop=wanted.plain_loop,
            evaluation=wanted.evaluation,
        )
        # A plain loop takes an optimizer step for every batch.
        return profile_report(found, size, accumulates=not wanted.plain_loop, depth=wanted.depth)


def _blocks(text: str) -> str | list[str]:
    """off, all, or the list of comma-separated names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return text if text in ("off", "all") or not names else names


def _show(report: ProfileReport) -> None:
    if sys.stdout.isatty():
        report.print()
    else:
        print(report, flush=True)
