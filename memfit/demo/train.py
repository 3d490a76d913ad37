"""The training with memfit, under the limit, and what came of it: `python -m memfit.demo.train`."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from torch import Tensor, nn

import memfit
from memfit._errors import MemfitError
from memfit._units import format_bytes, format_seconds
from memfit.demo.limit import Limit, limit_this_process, limited_device
from memfit.demo.model import next_byte_loss
from memfit.demo.task import Demo, Training, training
from memfit.demo.telling import more, tell
from memfit.demo.text import LibraryText
from memfit.hardware.meter import reserved_level
from memfit.reporting.progress import progress
from memfit.training.run import Run

FEWEST, MOST = 3, 30
"""Steps, where they are chosen by how long one takes."""


def run(demo: Demo) -> bool:
    """Train and tell; whether the gradient was the same."""
    text, device = LibraryText(demo.shape.length), limited_device()
    limit = limit_this_process(demo.budget, device)
    loss, peak = Loss(), Peak()
    fitted = fit(demo, training(demo, text, device), loss, limit)
    with peak.watching(limit.real and device.type == "cpu"):
        train(demo, fitted, loss, peak)
    tell_peak(fitted, peak)
    same = tell_verification(fitted)
    fitted.report().save(demo.report)
    tell("report", f"{demo.report}  (open it in a browser; it needs no network)")
    return same


class Loss:
    """The loss, telling how many sequences have been through it."""

    def __init__(self) -> None:
        self.seen: Callable[[int], None] | None = None

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a micro-batch."""
        loss = next_byte_loss(model, batch)
        if self.seen is not None:
            self.seen(len(batch[0]))
        return loss


class Peak:
    """The most memory that this process has reserved, which is what its limit counts, looked at every few milliseconds: the
    kernel keeps a record of the address space only, in which files come and go."""

    def __init__(self) -> None:
        self.most = 0
        self._looking = threading.Event()

    @contextmanager
    def watching(self, wanted: bool) -> Iterator[None]:
        """Looks while inside, if `wanted`."""
        if not wanted:
            yield
            return
        watch = threading.Thread(target=self._look, daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._looking.set()
            watch.join()

    def take(self, measured: float | None) -> None:
        """Take in what memfit measured."""
        self.most = max(self.most, int(measured or 0))

    def _look(self) -> None:
        while not self._looking.wait(0.005):
            self.take(reserved_level().held)


def fit(demo: Demo, task: Training, loss: Loss, limit: Limit) -> Run:
    """The one line, and the plan it came to."""

    def before_step() -> None:
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)

    tell("with memfit", f"run = memfit.wrap(model, optimizer, loader, loss_fn=loss_fn, target_batch={demo.target})")
    with progress("planning", None) as bar, redirect_stderr(io.StringIO()):  # the plan is told below
        bar.say("")
        fitted = memfit.wrap(
            task.model,
            task.optimizer,
            task.loader,
            loss_fn=loss,
            target_batch=demo.target,
            before_step=before_step,
            budget=limit.budget,
        )
    plan = fitted.plan
    assert plan is not None
    tell("plan", plan.summary())
    if limit.budget is None:
        more(f"the limit was not told but found ({limit.said}): {format_bytes(plan.limit)} with what Python itself holds")
    else:
        more(f"the limit was told to memfit: {limit.said}")
    return fitted


def train(demo: Demo, fitted: Run, loss: Loss, peak: Peak) -> None:
    """Train, showing the loss."""
    tell("training", f"run.step(batch), {demo.target} sequences each")
    began, told = time.perf_counter(), len(fitted.events)
    for step, batch in enumerate(endless(fitted.loader), 1):
        with showing(loss, f"step {step}", demo.target):
            start = time.perf_counter()
            value = float(fitted.step(batch))
            took = time.perf_counter() - start
        more(f"step {step:<3} loss {value:.3f}   {format_seconds(took)}")
        told = tell_changes(fitted, told)
        peak.take(fitted.stats()["peak_measured"])
        if is_last(demo, step, time.perf_counter() - began, took):
            break


def tell_changes(fitted: Run, told: int) -> int:
    """Say how the plan changed since so many events were told; how many have been told now."""
    for event in fitted.events[told:]:
        if event.kind == "replan":
            more(event.message)
    return len(fitted.events)


@contextmanager
def showing(loss: Loss, label: str, total: int) -> Iterator[None]:
    """On a terminal, a bar that moves with every micro-batch."""
    if not sys.stderr.isatty():
        yield
        return
    with progress(label, total) as bar:
        loss.seen = bar.advance
        yield
    loss.seen = None


def is_last(demo: Demo, step: int, elapsed: float, took: float) -> bool:
    """Whether training ends after this step."""
    if demo.steps is not None:
        return step >= demo.steps
    return step >= MOST or (step >= FEWEST and elapsed + took > demo.seconds) or elapsed > 2 * demo.seconds


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def tell_peak(fitted: Run, peak: Peak) -> None:
    """The most memory that was measured, against the budget."""
    plan = fitted.plan
    assert plan is not None
    errors = sum(event.kind == "out of memory" for event in fitted.events)
    if peak.most:
        most, allowed = format_bytes(peak.most), format_bytes(plan.limit)
        tell("measured", f"peak {most} of the {allowed} allowed, {errors} out-of-memory errors")


def tell_verification(fitted: Run) -> bool:
    """What `memfit.verify` finds."""
    with progress("verifying", None) as bar:
        bar.say("")
        found = memfit.verify(fitted)
    first, *others = str(found).splitlines()
    tell("verified", first)
    for line in others:
        more(line)
    return found.passed


def main() -> int:
    """The exit code."""
    try:
        return 0 if run(Demo.from_json(sys.argv[1])) else 1
    except MemfitError as error:
        print(f"memfit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
