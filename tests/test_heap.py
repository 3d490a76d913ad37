"""Free heap pages go back to the kernel once the process holds more than it may, and not before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FRAGMENTED = """
import torch
from memfit.hardware.meter import Meter
from memfit.training.heap import HeapWatch

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
