"""A model on fake tensors for a look at what it does with shapes; nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memfit.profiling.failures import telling_failures
from memfit.profiling.fake import FakeWorld
from memfit.profiling.sandbox import leave_no_trace


@contextmanager
def on_twins(model: nn.Module, device: torch.device) -> Iterator[FakeWorld]:
    """Inside, fakes stand in the places of the model's parameters and buffers; enter the world to run it. Raises TraceFailed
    for whatever is raised there."""
    world = FakeWorld()
    with leave_no_trace(model, device, real=False), telling_failures(world), world.replacing(model):
        yield world
