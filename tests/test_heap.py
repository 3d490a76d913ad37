"""Free heap pages go back to the kernel once the process holds more than it may, and not before."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Notes
from torch import nn

import memfit
from memfit.autotune.memory import BETWEEN
from memfit.autotune.trim_heap import HeapWatch

ROOT = Path(__file__).resolve().parent.parent
FRAGMENTED = """
import torch
from memfit.hardware.meter import Meter
from memfit.autotune.trim_heap import HeapWatch

meter, watch = Meter(torch.device("cpu")), HeapWatch()
torch.empty(31 * 2**20, dtype=torch.uint8)  # freed: glibc's dynamic threshold rises, and what follows lives in the heap
kept = [torch.ones(2**20, dtype=torch.uint8) for _ in range(256)]
full = meter.held()
kept = kept[::8]  # what stays holds the heap's top in its place
before = meter.held()
watch.check()
untouched = meter.held()
watch.ceiling = full + 16 * 2**20
watch.check()
below = watch.given_back
watch.ceiling = 2**20
watch.check()
print(full, before, untouched, below, watch.given_back, meter.held())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_free_pages_are_given_back_above_the_ceiling_only() -> None:
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=True, cwd=ROOT)
    full, before, untouched, below, given_back, after = map(int, done.stdout.split())
    assert before > full - (64 << 20)  # glibc keeps what was freed
    assert abs(untouched - before) < 16 << 20
    assert (below, given_back) == (0, 1)
    assert after < full - (128 << 20)

CHECKPOINTED = """
import torch
from torch.utils.data import DataLoader
from zoo import FAMILIES, first_batch
import memfit
family = FAMILIES["vit"]
model = family.build("bench", dropout=0.1)
there = sum(p.numel() * p.element_size() for p in model.parameters())
loader = DataLoader(family.dataset(size="bench", n=32), batch_size=32)
optimizer = torch.optim.AdamW(model.parameters())
settings = dict(loss_fn=family.loss, target_batch=32, micro_batch=32, checkpoint="all")
family.loss(model, first_batch(family, 1, size="bench")).backward()
model.zero_grad()
run = memfit.wrap(model, optimizer, loader, budget=there + 250 * 2**20, **settings)
for _ in range(3):
    for batch in run.loader:
        run.step(batch)
print(run.plan.limit, run.stats()["peak_measured"], len(run.plan.checkpoint), run.plan.predicted.peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_blocks_that_are_computed_again_do_not_fragment_the_heap_beyond_the_budget() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "ignore", "-c", CHECKPOINTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    limit, peak, blocks, _ = map(int, done.stdout.splitlines()[-1].split())
    assert blocks == 8
    assert peak <= limit

MANY = """
import torch
from torch import nn
import memfit
torch.manual_seed(0)
wide = 4096
model = nn.Sequential(nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, 8), nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 64))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(16000, 64)
run = memfit.wrap(model, optimizer, budget="330MiB", micro_batch=69)
for _ in range(2):
    optimizer.zero_grad()
    ((model(x) - x) ** 2).mean().backward()
    optimizer.step()
print(run.plan.limit, run.stats()["peak_measured"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_the_heap_is_watched_however_small_micro_batches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a budget has left beside the plan, a part stays free for what comes between two looks: told by two budgets, as
    where a ceiling lies depends on what this process held before."""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    model = nn.Linear(4, 4)
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1GiB", micro_batch=2)
    model(torch.randn(8, 4)).square().mean().backward()
    core, plan = run._core, run.plan
    assert core is not None and plan is not None and core.in_force.heap.ceiling is not None
    ceilings = [core.memory.heap_ceiling(replace(plan, limit=limit), core.profile) for limit in (4 << 30, 8 << 30)]
    assert None not in ceilings
    assert ceilings[1] - ceilings[0] == pytest.approx((4 << 30) * (1 - 1 / BETWEEN), abs=2)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):  # freed memory goes back by itself
        monkeypatch.setenv(name, "65536")
    assert core.memory.heap_ceiling(plan, core.profile) is None


class Tells(nn.Module):
    """A layer that notes when its forward and its backward run."""

    def __init__(self, events: Notes) -> None:
        super().__init__()
        self.layer, self.events = nn.Linear(4, 4), events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append("forward")
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.events.append("backward"))
        return out


@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_the_heap_is_looked_at_between_forward_and_backward_and_after_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward left free may not serve its backward, whose tensors then come on top."""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    events = Notes()
    model = Tells(events)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="8GiB", micro_batch=2)
    for _ in range(2):  # the second time without proofs and measurements
        events.clear()
        monkeypatch.setattr(HeapWatch, "check", lambda watch: events.append("look"))
        model(torch.randn(6, 4)).square().mean().backward()
    assert events == ["forward", "look", "backward", "look"] * 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_small_micro_batches_do_not_fill_the_budget_with_what_the_heap_keeps_of_each() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", MANY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    limit, peak = map(int, done.stdout.split())
    assert peak <= limit
