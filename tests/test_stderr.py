"""Scripts without a stderr train all the same: closed, None, or a pipe that nobody reads any more."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.reporting.progress import progress


class Gone(io.StringIO):
    """A pipe whose reader left."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


WITHOUT: dict[str, Callable[[], TextIO | None]] = {"closed": closed, "none": lambda: None, "gone": Gone}


@contextmanager
def without_stderr(why: str) -> Iterator[None]:
    """Not a fixture: pytest sets the stream anew between these and the test."""
    there, sys.stderr = sys.stderr, WITHOUT[why]()
    try:
        yield
    finally:
        sys.stderr = there


def mse(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("why", WITHOUT)
@pytest.mark.parametrize("loss_fn", [None, mse], ids=["script", "step"])
def test_it_trains_without_a_stderr(loss_fn: Callable[..., torch.Tensor] | None, why: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=2)
    with without_stderr(why):
        run = memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, target_batch=8, loss_fn=loss_fn)
        trained, optimizer, batches = run
        for batch in batches:
            if loss_fn is not None:
                run.step(batch)
                continue
            mse(trained, batch).backward()
            optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("why", WITHOUT)
def test_progress_goes_nowhere(why: str) -> None:
    clock = iter(range(0, 100, 10)).__next__
    with without_stderr(why), progress("planning", 2, clock=clock) as bar:
        bar.say("a")
        bar.advance()
