"""Trains with memfit under the limit, and prints the results: `python -m memfit.demo.train`."""

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
from memfit.demo.limit import DemoLimit, limit_this_process, limited_device
from memfit.demo.model import next_byte_loss
from memfit.demo.task import Demo, Training, training
from memfit.demo.telling import more, tell
from memfit.demo.text import LibraryText
from memfit.hardware.meter import reserved_level
from memfit.reporting.progress import progress
from memfit.training.run import Run

FEWEST, MOST = 3, 30
"""Bounds on the number of steps where the time decides it."""


def run(demo: Demo) -> bool:
    """Train and print the results. Returns whether the gradient is the same as without memfit."""
    text, device = LibraryText(demo.shape.length), limited_device()
    limit = limit_this_process(demo.budget, device)
    loss, peak = Loss(), PeakPoller()
    fitted = fit(demo, training(demo, text, device), loss, limit)
    with peak.watching(limit.real and device.type == "cpu"):
        train(demo, fitted, loss, peak)
    tell_peak(fitted, peak)
    same = tell_verification(fitted)
    fitted.report().save(demo.report)
    tell("report", f"{demo.report}  (open it in a browser; it needs no network)")
    return same


class Loss:
    """A loss function that reports the sequences it has processed to `seen`, for the progress bar."""

    def __init__(self) -> None:
        self.seen: Callable[[int], None] | None = None

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a micro-batch."""
        loss = next_byte_loss(model, batch)
        if self.seen is not None:
            self.seen(len(batch[0]))
        return loss


class PeakPoller:
    """Polls the peak of the memory that this process has reserved, which its limit counts. Polling (every 5 ms) is necessary
    because the kernel records a peak only of the address space, which includes mapped files."""

    def __init__(self) -> None:
        self.most = 0
        self._looking = threading.Event()

    @contextmanager
    def watching(self, wanted: bool) -> Iterator[None]:
        """Poll inside the context, if `wanted`."""
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
        """Include a peak that memfit measured."""
        self.most = max(self.most, int(measured or 0))

    def _look(self) -> None:
        while not self._looking.wait(0.005):
            self.take(reserved_level().held)


def fit(demo: Demo, task: Training, loss: Loss, limit: DemoLimit) -> Run:
    """Call `memfit.wrap`, and print the call and its plan."""

    def before_step() -> None:
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)

    tell("with memfit", f"run = memfit.wrap(model, optimizer, loader, loss_fn=loss_fn, target_batch={demo.target})")
    with progress("planning", None) as bar, redirect_stderr(io.StringIO()):  # the plan is printed below
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
        more(f"the limit was found, not given ({limit.said}): {format_bytes(plan.limit)} with what Python itself holds")
    else:
        more(f"memfit was given the limit: {limit.said}")
    return fitted


def train(demo: Demo, fitted: Run, loss: Loss, peak: PeakPoller) -> None:
    """Train, and print each step's loss."""
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
    """Print how the plan changed since the first `told` events. Returns the number of events so far."""
    for event in fitted.events[told:]:
        if event.kind == "replan":
            more(event.message)
    return len(fitted.events)


@contextmanager
def showing(loss: Loss, label: str, total: int) -> Iterator[None]:
    """On a terminal, show a progress bar that advances with every micro-batch."""
    if not sys.stderr.isatty():
        yield
        return
    with progress(label, total) as bar:
        loss.seen = bar.advance
        yield
    loss.seen = None


def is_last(demo: Demo, step: int, elapsed: float, took: float) -> bool:
    """Return whether training ends after this step."""
    if demo.steps is not None:
        return step >= demo.steps
    return step >= MOST or (step >= FEWEST and elapsed + took > demo.seconds) or elapsed > 2 * demo.seconds


def endless(loader: Any) -> Iterator[Any]:
    """Yield the loader's batches, epoch after epoch."""
    while True:
        yield from loader


def tell_peak(fitted: Run, peak: PeakPoller) -> None:
    """Print the measured peak against the budget."""
    plan = fitted.plan
    assert plan is not None
    errors = sum(event.kind == "out of memory" for event in fitted.events)
    if peak.most:
        most, allowed = format_bytes(peak.most), format_bytes(plan.limit)
        tell("measured", f"peak {most} of the {allowed} allowed, {errors} out-of-memory errors")


def tell_verification(fitted: Run) -> bool:
    """Print what `memfit.verify` finds. Returns whether it passed."""
    with progress("verifying", None) as bar:
        bar.say("")
        found = memfit.verify(fitted)
    first, *others = str(found).splitlines()
    tell("verified", first)
    for line in others:
        more(line)
    return found.passed


def main() -> int:
    """Run the training of the settings in argv[1]. Returns the exit code."""
    try:
        return 0 if run(Demo.from_json(sys.argv[1])) else 1
    except MemfitError as error:
        print(f"memfit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
