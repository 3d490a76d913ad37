"""Checks that a model can run a single sample: batch norm over [N, C] cannot, and `squeeze()` drops the batch dimension.

The check uses a real sample and the modules' training modes, with batch norm not frozen. It leaves no side effects. With
sharded parameters it uses fake tensors: a pass that fails midway would leave the other ranks waiting. Not covered: a model that
runs a single sample without an error and computes a different value from it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit._errors import RankFailed, first_line
from memfit.batches.tree import flat
from memfit.capture.call import Call
from memfit.capture.infer_layout import fake_outputs
from memfit.capture.output_leaf import Leaf, name_in
from memfit.engine.call_context import uncompiled
from memfit.engine.gradients import is_sharded
from memfit.engine.work import Work, loss_of
from memfit.hardware.exhausted import is_out_of_memory, retry_on_oom
from memfit.tracing.sandbox import leave_no_trace


def call_alone(call: Call) -> str | None:
    """Return why the call's model cannot run one sample the way it runs several, or None if it can."""
    looked_at = copy.copy(call)
    looked_at.copies = True

    def run(samples: int) -> list[Any]:
        found = flat(looked_at.output(looked_at.arguments(0, samples)))
        _backward([value for value in found if isinstance(value, torch.Tensor) and value.requires_grad], call.model)
        return found

    def look(samples: int) -> list[Any]:
        return flat(fake_outputs(call, samples)[0])

    found = _run_alone(look if is_sharded(call.model) else run, call.model, call.device)
    if found is None or isinstance(found, str):
        return found
    leaves = call.outputs.leaves
    if len(found) != len(leaves):
        return "it returns a different structure"
    return next((why for leaf, value in zip(leaves, found) if (why := _lost_dimension(leaf, value))), None)


def loss_alone(work: Work, model: nn.Module, twins: Callable[[int], AbstractContextManager[Work]]) -> str | None:
    """Return why the loss of one sample cannot be computed like that of several, or None if it can. `twins(samples)` yields
    `work` on fake tensors."""

    def run(samples: int) -> list[Any]:
        _backward([loss_of(work, samples)], model)
        return []

    def look(samples: int) -> list[Any]:
        with twins(samples) as twin:
            loss_of(twin, samples)
        return []

    found = _run_alone(look if is_sharded(model) else run, model, work.device)
    return found if isinstance(found, str) else None


def _backward(values: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Run a backward: some losses accept a sample without a batch dimension and only fail in their backward."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if values and parameters:
        torch.autograd.grad([value.sum() for value in values], parameters, allow_unused=True)


def _run_alone(run: Callable[[int], list[Any]], model: nn.Module, device: torch.device) -> list[Any] | str | None:
    """Return the output for one sample, or the error message. None if two samples fail, too: one sample is not the cause."""
    failed: list[str] = []
    for samples in (1, 2):
        try:
            with leave_no_trace(model, device), uncompiled(), torch.enable_grad():
                found = retry_on_oom(partial(run, samples), device)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, RankFailed):
                raise
            failed.append(first_line(error))
        else:
            return failed[0] if failed else found
    return None


def _lost_dimension(leaf: Leaf, value: Any) -> str | None:
    if leaf.axis is None or not isinstance(value, torch.Tensor) or value.dim() == len(leaf.shape):
        return None
    where, shape = name_in(leaf.path), tuple(value.shape)
    return f"{where} has the shape {shape} for it, not {leaf.shape_for(1)}"
