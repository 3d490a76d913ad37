"""Tracing an evaluation: forwards in eval mode without gradients, beside what the training holds meanwhile.

Two batches follow each other, so that the outputs of the first meet the forward of the second, as in a loop whose variables
keep their values until they are given the next. Not covered: loops that gather the outputs of all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memfit.batches.tree import tensors
from memfit.engine.accumulate import Work
from memfit.engine.context import uncompiled
from memfit.kernels.onednn import stages
from memfit.kernels.scratch import scratch
from memfit.profiling.ledger import Ledger
from memfit.profiling.plainly import Variables
from memfit.profiling.sandbox import collected_by_hand
from memfit.profiling.timeline import Timeline
from memfit.profiling.twins import on_twins

MakeForward = Callable[[Callable[[torch.Tensor], torch.Tensor]], Callable[[], Any]]
"""From a function that gives a tensor's twin to a forward on twins."""
BATCHES = 2
"""Batches that are traced one after the other."""


def evaluated(model: nn.Module, works: Sequence[list[Work]], ledger: Ledger, variables: Variables) -> list[Timeline]:
    """A timeline for each of these, a work for each batch of it. What is there when it begins counts as present."""
    with variables.watching(model), in_eval_mode(model), torch.no_grad():
        return [_evaluated(batches, ledger, variables) for batches in works]


def _evaluated(works: list[Work], ledger: Ledger, variables: Variables) -> Timeline:
    variables.clear()
    ledger.restart()
    while works:
        work = works.pop()  # it holds its batch, which has to end with the variable
        ledger.window()
        ledger.phase("input")
        inputs, _ = work.inputs(0, work.samples, None)
        ledger.present(tensors(inputs), "input")
        variables.hold_batch(inputs)
        ledger.phase("evaluation")
        variables.hold_loss(work.loss(work.forward(inputs)))
    return ledger.timeline()


def forwards(model: nn.Module, device: torch.device, makes: Sequence[MakeForward]) -> list[Timeline]:
    """A timeline of each of these forwards without gradients, in the mode that the model is in. Raises TraceFailed."""
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
    """`model.eval()`; afterwards each module is in the mode it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def one_each(make: Callable[[int], Work], sizes: Sequence[int]) -> list[list[Work]]:
    """Works of each of these sizes, one for every batch."""
    return [[make(n) for _ in range(BATCHES)] for n in sizes]
