"""Traces an evaluation: forwards in eval mode without gradients, while the memory held by training stays in place.

Two batches follow each other, so that the outputs of the first are alive during the forward of the second. A loop does the same
if its variables keep their values until the next assignment. Not covered: loops that collect the outputs of all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memfit.batches.tree import tensors
from memfit.engine.call_context import uncompiled
from memfit.engine.work import Work
from memfit.kernels.onednn import stages
from memfit.kernels.scratch import scratch
from memfit.profiling.timeline import Timeline
from memfit.tracing.fake_twins import on_twins
from memfit.tracing.ledger import Ledger
from memfit.tracing.plain_loop import Variables
from memfit.tracing.sandbox import collected_by_hand

MakeForward = Callable[[Callable[[torch.Tensor], torch.Tensor]], Callable[[], Any]]
"""Takes a function that maps a tensor to its fake twin; returns a forward on twins."""
BATCHES = 2
"""Number of batches traced one after the other."""


def evaluated(model: nn.Module, works: Sequence[list[Work]], ledger: Ledger, variables: Variables) -> list[Timeline]:
    """Traces a timeline for each entry of `works`, which holds a work per batch. What exists at its start counts as present."""
    with variables.watching(model), in_eval_mode(model), torch.no_grad():
        return [_evaluated(batches, ledger, variables) for batches in works]


def _evaluated(works: list[Work], ledger: Ledger, variables: Variables) -> Timeline:
    variables.clear()
    ledger.restart()
    while works:
        work = works.pop()  # it keeps its batch alive, which must die with the variable
        ledger.window()
        ledger.phase("input")
        inputs, _ = work.inputs(0, work.samples, None)
        ledger.present(tensors(inputs), "input")
        variables.hold_batch(inputs)
        ledger.phase("evaluation")
        variables.hold_loss(work.loss(work.forward(inputs)))
    return ledger.timeline()


def forwards(model: nn.Module, device: torch.device, makes: Sequence[MakeForward]) -> list[Timeline]:
    """Traces a timeline of each of these forwards without gradients, in the current mode of the model. Raises TraceFailed."""
    ledger = Ledger(device, inside=stages if device.type == "cpu" else _scratch_of if device.type == "cuda" else None)
    with on_twins(model, device) as world, collected_by_hand():
        made = [make(world.twin) for make in makes]
        found = []
        with world.entered(), ledger, uncompiled(), torch.no_grad():
            for run in made:
                ledger.restart()
                ledger.window()
                ledger.phase("evaluation")
                output = run()
                found.append(ledger.timeline())
                del output
    return found


def _scratch_of(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    return (scratch(func, args, out),)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Calls `model.eval()`; on exit, each module returns to its previous mode."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def one_each(make: Callable[[int], Work], sizes: Sequence[int]) -> list[list[Work]]:
    """Makes `BATCHES` works for each of these sizes."""
    return [[make(n) for _ in range(BATCHES)] for n in sizes]
