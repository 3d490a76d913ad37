"""Runs a model on fake tensors to see what it does with shapes, without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memfit.tracing.failures import telling_failures
from memfit.tracing.fake import FakeWorld
from memfit.tracing.sandbox import leave_no_trace


@contextmanager
def on_twins(model: nn.Module, device: torch.device) -> Iterator[FakeWorld]:
    """Replaces the model's parameters and buffers with fake tensors; enter the yielded world to run it. Raises TraceFailed for
    whatever is raised inside."""
    world = FakeWorld()
    with leave_no_trace(model, device, real=False), telling_failures(world), world.replacing(model):
        yield world
