"""Shows the demo: prints what the reader sees, in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch
from torch.optim import AdamW

import memfit
from memfit._units import format_bytes, format_count
from memfit.demo.limit import can_limit, limited_device
from memfit.demo.model import BYTES, ByteGPT, next_byte_loss
from memfit.demo.task import Demo
from memfit.demo.telling import more, tell
from memfit.reporting.progress import progress

SAMPLES = 16
"""Number of sequences in the batch with which a step's memory is traced."""


def run_demo(demo: Demo) -> int:
    """Show the demo, and return the exit code."""
    device = limited_device()
    tell_asked(demo)
    if can_limit(device):
        tell_without_memfit(demo)
    else:
        tell("without memfit", "not shown: this system cannot limit a process, and the machine itself would run out")
    return subprocess.run(_command("train", demo), env=_environment()).returncode


def tell_asked(demo: Demo) -> None:
    """Print the task, and the memory that the whole batch would need."""
    with torch.device("meta"):
        model = ByteGPT(demo.shape)
    text = torch.randint(0, BYTES, (SAMPLES, demo.shape.length))
    with progress("tracing what the whole batch would need", None) as bar:
        bar.say("")
        found = memfit.profile(model, AdamW(model.parameters()), (text, text), loss_fn=next_byte_loss)
    need = found.peak(demo.target, accumulates=False).expected
    count = format_count(sum(p.numel() for p in model.parameters()))
    tell("asked", f"train a GPT ({count} parameters) on the source text of Python's own library,")
    more(f"{demo.target} sequences of {demo.shape.length} bytes per optimizer step, within {format_bytes(demo.budget)}")
    tell("needs", f"{format_bytes(need)} for the whole batch at once (predicted; nothing was run)")


def tell_without_memfit(demo: Demo) -> None:
    """Run one step without memfit, and print how it ends."""
    with progress("trying it without memfit", None) as bar:
        bar.say("")
        done = subprocess.run(_command("whole", demo), env=_environment(), capture_output=True, text=True)
    if done.returncode == 0:
        tell("without memfit", "one step runs too: the whole batch fits within the limit")
        return
    tell("without memfit", "dies at its first step, in a process with this limit:")
    more(_last_words(done))


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")


def _environment() -> dict[str, str]:
    """The environment without the variable that switches memfit off."""
    # Spinning OpenMP threads make a step ten times as slow where other programs share the cores (measured).
    return {"OMP_WAIT_POLICY": "passive"} | {name: value for name, value in os.environ.items() if name != "MEMFIT"}


def _command(name: str, demo: Demo) -> list[str]:
    return [sys.executable, "-m", f"memfit.demo.{name}", demo.to_json()]
