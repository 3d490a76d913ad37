"""The commands: each reads its arguments, lets the library work, and prints what came of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Optional

import typer

from memfit import __version__
from memfit._asked import Asked
from memfit._errors import UsageError
from memfit._units import TiB
from memfit._values import check_count
from memfit.cli.ending import FAILED, ending
from memfit.cli.functions import Training, check_file, made_by, split_target, train_once
from memfit.cli.saved import read_saved, save_plan, show
from memfit.cli.scripts import planned_by_script, stopped_at_plan
from memfit.hardware.budget import asked_bytes, probe as probe_budget
from memfit.planning.export import EXPORTS
from memfit.reporting.progress import progress
from memfit.reporting.report import Report
from memfit.reporting.verification import Verification

app = typer.Typer(
    help="Say the batch you want; memfit fits the training into the memory you have, with the same gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# typer reads these annotations when a command is called, and Python 3.10 knows `X | None` only where nothing reads it.
Budget = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Most memory for the training (on a GPU: for all of the process): 6GiB, 800MiB, or a share such as 0.9."),
]
TargetBatch = Annotated[Optional[int], typer.Option(help="Samples per optimizer step, over all processes.")]  # noqa: UP045


def main() -> None:
    """What `memfit` and `python -m memfit` run."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Say the batch you want; memfit fits the training into the memory you have, with the same gradients."""


@app.command()
def probe(budget: Budget = None) -> None:
    """How much memory a training may use here."""
    with ending():
        print(probe_budget(budget=budget_from(budget)))


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TRAIN.py|FILE.py:FUNCTION",
            help="A script that calls memfit.wrap, or a function that returns (model, optimizer, loader[, loss_fn]).",
        ),
    ],
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="-- ARGUMENTS", help="The script's own arguments, after --."),
    ] = None,
    target_batch: TargetBatch = None,
    budget: Budget = None,
    save: Annotated[Optional[Path], typer.Option(help="Also write the plan to this JSON file.")] = None,  # noqa: UP045
    export: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"Also print it as arguments of another tool: {', '.join(EXPORTS)}."),
    ] = None,
) -> None:
    """Make the plan of a training without running it.

    A script runs until its first memfit.wrap has a plan, and is stopped there. The options replace what it passes.
    """
    file, function = split_target(target)
    with ending(file):
        asked = Asked(checked_target(target_batch), budget_from(budget))
        if export is not None and export not in EXPORTS:
            raise UsageError(f"--export {export}", found="no such tool", next_move=f"use one of {', '.join(EXPORTS)}")
        if function is None:
            check_file(file)
            typer.echo(f"memfit: running {file.name} until there is a plan, and no further", err=True)
            report = planned_by_script(file, arguments or (), asked)
        else:
            _no_arguments(target, arguments)
            report = _planned_by_function(made_by(file, function), target, asked)
        show(report)
        if export is not None:
            print(f"\n{report.plan.export(export)}", flush=True)
        if save is not None:
            save_plan(report.plan, save)
            typer.echo(f"memfit: the plan is in {save}", err=True)


@app.command()
def verify(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns (model, optimizer, loader, loss_fn)."),
    ],
    target_batch: TargetBatch = None,
    budget: Budget = None,
) -> None:
    """Compare the gradient of micro-batches with that of the whole batch. Exit code 1 where they differ."""
    file, function = split_target(target)
    with ending(file):
        asked = checked_target(target_batch), budget_from(budget)
        if function is None:
            raise UsageError(
                f"verifying {target}",
                found="it names no function",
                next_move="write FILE.py:function, a function that returns (model, optimizer, loader, loss_fn)",
            )
        found = _verified(made_by(file, function), target, *asked)
        print(found)
        if not found.passed:
            raise typer.Exit(FAILED)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="A saved plan, or a report saved as .json.")],
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also write it to this file: .html, .md or .json."),
    ] = None,
) -> None:
    """Print a saved plan or report."""
    with ending():
        found = read_saved(file)
        show(found)
        if save is not None:
            found.save(save)
            typer.echo(f"memfit: the report is in {save}", err=True)


@app.command()
def demo(
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Optimizer steps to train; without it as many as take a good minute."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Memory that the training may take.")] = "1GiB",
    report: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = Path("memfit-report.html"),
) -> None:
    """Train a small GPT on this Python's own library, under a real memory limit. Takes about three minutes."""
    from memfit.demo.show import run_demo
    from memfit.demo.task import Demo, check_report_path

    with ending():
        if steps is not None:
            check_count("steps", steps)
        allowed = asked_bytes(budget_from(budget) or budget, TiB)
        code = run_demo(Demo(allowed, steps, str(check_report_path(report))))
        if code:
            raise typer.Exit(code)


# ---- parts


def budget_from(text: str | None) -> int | float | str | None:
    """A budget as typed: a size, a number of bytes or a share of the device. Raises UsageError if it cannot be meant."""
    if text is None:
        return None
    if re.fullmatch(r"-?\d+", text.strip()):
        budget: int | float | str = int(text)
    else:
        budget = float(text) if re.fullmatch(r"-?(\d+\.\d*|\.\d+)", text.strip()) else text
    asked_bytes(budget, TiB)  # only whether it can be meant: the device is the script's business
    return budget


def checked_target(target_batch: int | None) -> int | None:
    """A target batch of at least 1. Raises UsageError."""
    if target_batch is not None:
        check_count("target_batch", target_batch)
    return target_batch


def _no_arguments(target: str, arguments: list[str] | None) -> None:
    if arguments:
        raise UsageError(
            f"the arguments {' '.join(arguments)!r} for {target}",
            found="a function is called without arguments",
            next_move="leave them away, or name the script alone",
        )


def _planned_by_function(training: Training, target: str, asked: Asked) -> Report:
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


def _verified(training: Training, target: str, target_batch: int | None, budget: int | float | str | None) -> Verification:
    with progress(f"verifying {target}", None) as bar:
        bar.say("planning")
        run = training.wrapped(target_batch, budget)
        bar.say("comparing one batch whole with the same in micro-batches")
        try:
            return run.verify()
        except UsageError:  # nothing was cut so far
            train_once(run, target)
            return run.verify()
