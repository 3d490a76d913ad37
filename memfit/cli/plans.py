"""Runs `memfit plan`: for a script, a function or a configuration, on this machine's device, one card or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from torch.utils.data import DataLoader

from memfit._arguments import check_accumulate_in
from memfit._asked import Asked
from memfit._errors import DoesNotFit, UsageError
from memfit._values import check_count
from memfit.batches.cut import shared_samples
from memfit.cli import configs
from memfit.cli.cards import TrainingSubject, compared, named_card, named_cards, planned_for
from memfit.cli.functions import UserTraining, check_file, made_by, split_target, train_once
from memfit.cli.saved import save_plan, show
from memfit.cli.scripts import planned_by_script, stopped_at_plan
from memfit.loading.pool import planning_pool
from memfit.planning.export import EXPORTS
from memfit.reporting.files import check_writable, write_text
from memfit.reporting.progress import progress
from memfit.reporting.report import Report


@dataclass(frozen=True)
class PlanOptions:
    """Holds the options of `memfit plan` as typed, except for the budget, which is parsed."""

    target: str | None = None
    arguments: Sequence[str] = ()
    target_batch: int | None = None
    budget: int | float | str | None = None
    device: str | None = None
    devices: str | None = None
    hf_config: Path | None = None
    seq_len: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    task: str | None = None
    accumulate_in: str = "float32"
    save: Path | None = None
    export: str | None = None

    @property
    def file(self) -> Path | None:
        """The Python file to run; None without one."""
        return None if self.target is None else split_target(self.target)[0]


def plan_as(wanted: PlanOptions) -> None:
    """Plan, print the result, and save or export what was asked for. Raises MemfitError."""
    _check(wanted)
    save = None if wanted.save is None else wanted.save.absolute()  # the script may change the working directory
    if wanted.save is not None:
        check_writable(wanted.save, "the plan" if wanted.devices is None else "the comparison")
    if wanted.devices is not None:
        _compare(wanted, wanted.devices, save)
        return
    report = _report(wanted)
    show(report)
    if wanted.export is not None:
        print(f"\n{report.plan.export(wanted.export)}", flush=True)
    if save is not None:
        save_plan(report.plan, save)
        typer.echo(f"memfit: the plan is in {wanted.save}", err=True)


def _compare(wanted: PlanOptions, devices: str, save: Path | None) -> None:
    chosen = named_cards(devices)
    subject = _subject(wanted)
    with progress("planning for devices that are not here", len(chosen)) as bar:
        found = compared(subject, chosen, wanted.budget, bar)
    show(found)
    if save is not None:
        write_text(save, found.to_json(), "the comparison")
        typer.echo(f"memfit: the comparison is in {wanted.save}", err=True)


def _report(wanted: PlanOptions) -> Report:
    card = None if wanted.device is None else named_card(wanted.device)
    asked = Asked(wanted.target_batch, wanted.budget, card)
    file, function = (None, None) if wanted.target is None else split_target(wanted.target)
    if file is not None and function is None:
        check_file(file)
        typer.echo(f"memfit: running {file.name} only until there is a plan", err=True)
        return planned_by_script(file, wanted.arguments, asked)
    if file is not None and function is not None and card is None:
        return _planned_by_function(made_by(file, function), str(wanted.target), asked)
    assert card is not None
    subject = _subject(wanted)
    with progress(f"planning for {card.title}", None) as bar:
        bar.say("")
        try:
            return planned_for(subject, card, wanted.budget)
        except DoesNotFit as error:
            more = f"{error.next_move}; --devices all instead of --device shows which cards it fits on"
            if subject.widens:
                more += "; --accumulate-in param sums gradients in the weights' own precision, in half the bytes"
            raise DoesNotFit(error.asked, found=error.found, next_move=more) from None


# ---- what is planned


def _subject(wanted: PlanOptions) -> TrainingSubject:
    """Build the training from a function or a configuration. Raises UsageError."""
    if wanted.hf_config is not None:
        return _of_config(wanted, wanted.hf_config)
    file, function = split_target(str(wanted.target))
    assert function is not None
    training = made_by(file, function)
    pool = planning_pool(training.loader) if isinstance(training.loader, DataLoader) else None
    sample = next(iter(training.loader), None) if pool is None else pool[0]
    if sample is None:
        raise UsageError(str(wanted.target), found="its loader yields nothing", next_move="return one that yields batches")
    target_batch = wanted.target_batch or getattr(training.loader, "batch_size", None) or shared_samples(sample)
    if target_batch is None:
        raise _no_target(str(wanted.target), "its batches do not say how many samples they have")
    return TrainingSubject(
        training.model, training.optimizer, sample, training.loss_fn, target_batch, accumulate_in=wanted.accumulate_in
    )


def _of_config(wanted: PlanOptions, path: Path) -> TrainingSubject:
    if wanted.target_batch is None:
        raise _no_target(f"--hf-config {path}", "a configuration has no batches, so their size is unknown")
    asked = configs.ConfigOptions(path, wanted.seq_len, wanted.precision, wanted.optimizer or "adamw", wanted.task)
    built = configs.built(asked)
    typer.echo(f"memfit: {type(built.model).__name__}, {built.what}; nothing is computed or downloaded", err=True)
    return TrainingSubject(
        built.model,
        built.optimizer,
        built.sample,
        configs.own_loss,
        wanted.target_batch,
        built.what,
        lowered=wanted.precision is None,
        accumulate_in=wanted.accumulate_in,
    )


def _no_target(asked: str, found: str) -> UsageError:
    return UsageError(asked, found=found, next_move="pass --target-batch, the samples per optimizer step")


def _planned_by_function(training: UserTraining, target: str, asked: Asked) -> Report:
    def work() -> None:
        run = training.wrapped(asked.target_batch, asked.budget)
        train_once(run, target)

    with progress(f"planning {target}", None) as bar:
        bar.say("")
        found = stopped_at_plan(work, asked)
    if found is None:
        raise UsageError(
            f"the plan of {target}",
            found="its first training step ended without one",
            next_move="check that the model is in train() mode and has parameters that require gradients",
        )
    return found


# ---- options that do not go together


def _check(wanted: PlanOptions) -> None:
    if wanted.target_batch is not None:
        check_count("target_batch", wanted.target_batch)
    check_accumulate_in(wanted.accumulate_in)
    _check_what(wanted)
    _check_where(wanted)
    function = None if wanted.target is None else split_target(wanted.target)[1]
    if wanted.arguments and function is not None:
        raise UsageError(
            f"the arguments {' '.join(wanted.arguments)!r} for {wanted.target}",
            found="a function is called without arguments",
            next_move="omit them, or name the script alone",
        )
    if wanted.export is not None and wanted.export not in EXPORTS:
        raise UsageError(f"--export {wanted.export}", found="no such tool", next_move=f"use one of {', '.join(EXPORTS)}")


def _check_what(wanted: PlanOptions) -> None:
    if wanted.target is None and wanted.hf_config is None:
        raise UsageError(
            "memfit plan",
            found="it names no training",
            next_move="name a script, FILE.py:function, or --hf-config config.json",
        )
    if wanted.target is not None and wanted.hf_config is not None:
        raise UsageError(
            f"{wanted.target} and --hf-config {wanted.hf_config}",
            found="these are two trainings",
            next_move="name one of them",
        )
    given = [name for name in ("seq_len", "precision", "optimizer", "task") if getattr(wanted, name) is not None]
    if wanted.hf_config is None and given:
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError(
            f"{option} {getattr(wanted, given[0])}",
            found=f"it belongs to --hf-config, and {wanted.target} says itself what it trains",
            next_move="omit it, or change it in the file",
        )


def _is_function_on_cards(wanted: PlanOptions) -> bool:
    on_cards = wanted.device is not None or wanted.devices is not None
    return on_cards and wanted.target is not None and split_target(wanted.target)[1] is not None


def _check_where(wanted: PlanOptions) -> None:
    if wanted.device is not None and wanted.devices is not None:
        raise UsageError(
            f"--device {wanted.device} and --devices {wanted.devices}",
            found="one plans for a card, the other compares several",
            next_move="omit one of them",
        )
    if wanted.devices is not None and wanted.target is not None and split_target(wanted.target)[1] is None:
        raise UsageError(
            f"--devices {wanted.devices} for the script {wanted.target}",
            found="a script runs until its wrap has a plan, which is for one device",
            next_move="name one with --device, or a function as FILE.py:function",
        )
    if wanted.devices is not None and wanted.export is not None:
        raise UsageError(
            f"--export {wanted.export} with --devices",
            found="several plans are compared, and none is chosen",
            next_move="name one card with --device",
        )
    if wanted.accumulate_in != "float32" and wanted.hf_config is None and not _is_function_on_cards(wanted):
        raise UsageError(
            f"--accumulate-in {wanted.accumulate_in} for {wanted.target}",
            found="its own memfit.wrap, or the run that trains it here, sets how gradients add up",
            next_move=f"write accumulate_in={wanted.accumulate_in!r} in its memfit.wrap, or plan a function with --device",
        )
    if wanted.hf_config is not None and wanted.device is None and wanted.devices is None:
        raise UsageError(
            f"--hf-config {wanted.hf_config}",
            found="it names no device, and a configuration has none",
            next_move="add --device a100-40gb, a size like --device 24GiB, or --devices all",
        )
