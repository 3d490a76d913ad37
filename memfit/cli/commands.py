"""The commands. Each reads its arguments, calls the library and prints the result."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Optional

import typer

from memfit import __version__
from memfit._errors import UsageError
from memfit._units import TiB
from memfit._values import check_count
from memfit.cli.configs import OPTIMIZERS, TASKS
from memfit.cli.ending import FAILED, ending
from memfit.cli.functions import UserTraining, made_by, split_target, train_once
from memfit.cli.plans import PlanOptions, plan_as
from memfit.cli.profiles import ProfileOptions, profile_as
from memfit.cli.saved import read_saved, show
from memfit.cli.snapshots import replayed
from memfit.hardware.budget import asked_bytes, probe as probe_budget
from memfit.levers.precision import PRECISIONS
from memfit.planning.export import EXPORTS
from memfit.profiling.describe import DEPTH
from memfit.profiling.loop import AFTER_STEP, ZERO_GRAD
from memfit.reporting.progress import progress
from memfit.reporting.verification import Verification

app = typer.Typer(
    help="Say the batch you want; memfit fits the training into the memory you have, with the same gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# typer evaluates these annotations when a command is called, hence Optional instead of `X | None`.
Budget = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Memory limit of the training (on a GPU: of the whole process): 6GiB, 800MiB, or a share such as 0.9."),
]
TargetBatch = Annotated[Optional[int], typer.Option(help="Samples per optimizer step, over all processes.")]  # noqa: UP045


def main() -> None:
    """Run the command line, for `memfit` and `python -m memfit`."""
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
    """Show how much memory a training may use on this machine."""
    with ending():
        print(probe_budget(budget=budget_from(budget)))


@app.command()
def plan(
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[TRAIN.py|FILE.py:FUNCTION]",
            help="A script that calls memfit.wrap, or a function that returns (model, optimizer, loader[, loss_fn]).",
        ),
    ] = None,
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="-- ARGUMENTS", help="The script's own arguments, after --."),
    ] = None,
    target_batch: TargetBatch = None,
    budget: Budget = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Plan for a GPU that is not here: a100-40gb, rtx-4090, or the size of its memory, 24GiB."),
    ] = None,
    devices: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Compare GPUs that are not here: all, or names such as a100-40gb,rtx-4090,24GiB."),
    ] = None,
    hf_config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Instead of a script: a transformers configuration, or its directory. Nothing is downloaded."),
    ] = None,
    seq_len: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="With --hf-config: tokens per sample."),
    ] = None,
    precision: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"With --hf-config: the weights' precision, {', '.join(PRECISIONS)}; else the configuration's."),
    ] = None,
    optimizer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"With --hf-config: {', '.join(OPTIMIZERS)}; adamw by default."),
    ] = None,
    task: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"With --hf-config: {', '.join(TASKS)}; else what the configuration names."),
    ] = None,
    accumulate_in: Annotated[
        str,
        typer.Option(help="Precision that sums half precision gradients: float32, or param for the weights' own."),
    ] = "float32",
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also write the plan, or the comparison of --devices, to this JSON file."),
    ] = None,
    export: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"Also print it as arguments of another tool: {', '.join(EXPORTS)}."),
    ] = None,
) -> None:
    """Plan a training without running it.

    A script runs until its first memfit.wrap has a plan, and stops there. The options override what it passes.
    """
    wanted = PlanOptions(
        target,
        tuple(arguments or ()),
        target_batch,
        device=device,
        devices=devices,
        hf_config=hf_config,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        task=task,
        accumulate_in=accumulate_in,
        save=save,
        export=export,
    )
    with ending(wanted.file):
        plan_as(replace(wanted, budget=budget_from(budget)))


@app.command()
def profile(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns (model, optimizer, loader[, loss_fn])."),
    ],
    micro_batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Samples per forward; default: the loader's batch size."),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="For a GPU that is not here: a100-40gb, rtx-4090, or the size of its memory, 24GiB."),
    ] = None,
    precision: Annotated[str, typer.Option(help=f"off (as the script computes), {', '.join(PRECISIONS)}.")] = "off",
    checkpoint: Annotated[str, typer.Option(help="off, all, or names of blocks with commas between.")] = "off",
    depth: Annotated[int, typer.Option(help="Levels of modules to show below the model.")] = DEPTH,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also write it to this file: .html, .json (every allocation) or .md."),
    ] = None,
    max_grad_norm: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="The script clips the norm of its gradients to this (clip_grad_norm_)."),
    ] = None,
    clip_grad_value: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="The script clips its gradients at this (clip_grad_value_)."),
    ] = None,
    zero_grad: Annotated[str, typer.Option(help=f"How long gradients are there: {', '.join(ZERO_GRAD)}.")] = AFTER_STEP,
    plain_loop: Annotated[
        bool, typer.Option("--plain-loop", help="The step of a loop without memfit: one batch, its variables stay bound.")
    ] = False,
    evaluation: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Samples of an evaluation batch: its memory is reported, too."),
    ] = None,
) -> None:
    """Show where the memory and the time of a training step go, module by module, and why the peak is where it is."""
    with ending(split_target(target)[0]):
        loop = max_grad_norm, clip_grad_value, zero_grad, plain_loop, evaluation
        profile_as(ProfileOptions(target, micro_batch, device, precision, checkpoint, depth, save, *loop))


@app.command()
def verify(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns (model, optimizer, loader, loss_fn)."),
    ],
    target_batch: TargetBatch = None,
    budget: Budget = None,
) -> None:
    """Compare the gradient of micro-batches with that of the whole batch. Exit code 1 if they differ or cannot be compared."""
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
def snapshot(
    file: Annotated[Path, typer.Argument(help="A pickle of torch.cuda.memory._snapshot(), as _dump_snapshot writes it.")],
) -> None:
    """Replay a recorded memory snapshot through the simulated allocator. Exit code 1 if they differ or nothing was recorded.

    Nothing in the file is executed.
    """
    with ending():
        told, identical = replayed(file)
        print(told)
        if not identical:
            raise typer.Exit(FAILED)


@app.command()
def demo(
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Optimizer steps to train; default: as many as take about a minute."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Memory that the training may take.")] = "1GiB",
    report: Annotated[Path, typer.Option(help="Path of the HTML report.")] = Path("memfit-report.html"),
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
    """Parse a budget as typed: a size, a number of bytes or a fraction of the device. Raises UsageError for an invalid one."""
    if text is None:
        return None
    if re.fullmatch(r"-?\d{1,30}", text.strip()):
        budget: int | float | str = int(text)
    else:
        budget = float(text) if re.fullmatch(r"-?(\d+\.\d*|\.\d+)", text.strip()) else text
    asked_bytes(budget, TiB)  # only validates: the script chooses the device
    return budget


def checked_target(target_batch: int | None) -> int | None:
    """Return the target batch if it is None or at least 1. Raises UsageError otherwise."""
    if target_batch is not None:
        check_count("target_batch", target_batch)
    return target_batch


def _verified(training: UserTraining, target: str, target_batch: int | None, budget: int | float | str | None) -> Verification:
    with progress(f"verifying {target}", None) as bar:
        bar.say("planning")
        run = training.wrapped(target_batch, budget)
        bar.say("comparing one whole batch with the same in micro-batches")
        try:
            return run.verify()
        except UsageError:  # no batch was cut into micro-batches so far
            train_once(run, target)
            return run.verify()
