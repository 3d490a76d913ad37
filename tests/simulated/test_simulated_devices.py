"""Several devices, threads, streams, events, and the places where the host waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import simcuda
import torch
from torch import nn


class Where(torch.autograd.Function):
    """Notes the thread and the current device of each backward."""

    seen: list[tuple[int, int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Where.seen.append((threading.get_ident(), torch.cuda.current_device()))
        return grad


def test_each_device_has_a_thread_of_autograds() -> None:
    first, second = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 2).to("cuda:1")
    x = torch.randn(3, 4, device="cuda:0", requires_grad=True)
    Where.seen.clear()
    Where.apply(second(Where.apply(first(Where.apply(x))).to("cuda:1"))).sum().backward()
    assert [device for _, device in Where.seen] == [1, 0, 0]
    (one, _), (two, _), (three, _) = Where.seen
    assert one != two == three and x.grad is not None and x.grad.device.index == 0
    assert torch.cuda.memory_allocated(1) > 0


def test_the_current_device() -> None:
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1 and torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:5")


def test_streams_and_events() -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        x = torch.ones(1000, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    (x @ x).item()
    b.record()
    torch.cuda.synchronize()
    assert a.query() and a.elapsed_time(b) > 0


def test_waits_of_the_host_are_counted() -> None:
    x = torch.arange(6.0, device="cuda")
    simcuda.reset_counters()
    (x * 2).sum()
    assert simcuda.counters()["syncs"] == 0
    x.sum().item(), x[x > 2], x.nonzero(), x.cpu(), bool((x > 1).any()), torch.equal(x, x)
    assert simcuda.counters()["syncs"] == 6
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()


SEEN = """
import torch
there = range(torch.cuda.device_count())
print(torch.cuda.is_available(), [torch.cuda.get_device_properties(i).uuid[-1] for i in there])
"""


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        ("", "False []"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("1,0", "True ['1', '0']"), ("0,7,1", "True ['0']"))),
        pytest.param(None, "True ['0', '1']", marks=pytest.mark.slow),
    ],
)
def test_devices_may_be_hidden(visible: str | None, said: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == said
