"""The simulated allocator against the real one: what a device recorded is what the replay does, segment by segment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit._units import GiB
from memfit.allocators.agreement import Agreement
from memfit.allocators.replay import replay
from memfit.allocators.snapshot import read_snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

# Each setting has a process of its own: the allocator reads them once, and a history begins before the first allocation.
PROGRAM = """
import json, sys, torch
from torch import nn

path, entries, parts = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
torch.cuda.memory._record_memory_history(max_entries=entries, context=None)

def step(model, optimizer, batch):
    loss = model(torch.randn(batch, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def blocks(width, depth):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(*layers).cuda()

if "train" in parts:
    model = blocks(512, 12)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in (256, 4096, 1000, 7000, 4096):
        step(model, optimizer, batch)
if "streams" in parts:
    side = torch.cuda.Stream()
    for size in (1 << 20, 5 << 20, 30 << 20):
        x = torch.empty(size, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            y = x + 1
        x.record_stream(side)
        del x
        torch.cuda.synchronize()
        z = torch.empty(size, dtype=torch.uint8, device="cuda")
        del y, z
if "empty" in parts:
    torch.cuda.empty_cache()
    step(model, optimizer, 3000)
if "graph" in parts:
    static = torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = (static * 2).relu().repeat(40, 1) + 1
    graph.replay()
if "failure" in parts:
    held = []
    try:
        while True:
            held.append(torch.empty(97 << 20, dtype=torch.uint8, device="cuda"))
            if len(held) % 3 == 0:
                held.pop(0)
            held.append(torch.empty(31 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        held = held[::2]
    step(model, optimizer, 512)

torch.cuda.synchronize()
stats = torch.cuda.memory_stats()
torch.cuda.memory._dump_snapshot(path)
names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocated_bytes.all.current", "reserved_bytes.all.current")
print(json.dumps([stats[name] for name in names]))
"""
CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "max_split_size_mb:64,max_non_split_rounding_mb:64",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,8:8,>:4]",
]
NEWER = ["large_segment_size_mb:32", "large_segment_size_mb:12,expandable_segments:True"]
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def recorded(tmp_path: Path, conf: str, parts: str, *, entries: int = 10**6) -> tuple[Path, list[int]]:
    """The snapshot of a process with that setting, and torch's own peaks and totals."""
    path = tmp_path / "snapshot.pickle"
    environ = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    if conf:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = conf
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(path), str(entries), parts]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert child.returncode == 0, child.stderr
    return path, json.loads(child.stdout.splitlines()[-1])


def agrees(agreement: Agreement, stats: list[int]) -> None:
    assert agreement.identical, agreement.difference
    assert agreement.compared > 0 and agreement.allocations > 0 and agreement.assumed == 0
    mine = [agreement.peak_allocated, agreement.peak_reserved.replayed]
    assert [*mine, agreement.allocated.replayed, agreement.reserved.replayed] == stats


@pytest.mark.parametrize("conf", CONFS + NEWER * (VERSION >= (2, 13)))
def test_a_training_step_takes_the_segments_the_replay_takes(tmp_path: Path, conf: str) -> None:
    path, stats = recorded(tmp_path, conf, "train,streams,empty")
    agrees(replay(read_snapshot(path)), stats)


@pytest.mark.parametrize("conf", ["", "max_split_size_mb:24"])
def test_running_out_of_memory_goes_the_same_way(tmp_path: Path, conf: str) -> None:
    if VERSION < (2, 10):
        pytest.skip("the fraction is a setting in later versions alone")
    memory = torch.cuda.get_device_properties(0).total_memory
    text = ",".join(filter(None, [conf, f"per_process_memory_fraction:{2 * GiB / memory:.6f}"]))
    path, stats = recorded(tmp_path, text, "train,streams,empty,failure")
    agrees(replay(read_snapshot(path), device_memory=memory), stats)


def test_garbage_is_collected_alike(tmp_path: Path) -> None:
    if VERSION < (2, 10):
        pytest.skip("the fraction is a setting in later versions alone")
    memory = torch.cuda.get_device_properties(0).total_memory
    text = f"garbage_collection_threshold:0.5,per_process_memory_fraction:{2 * GiB / memory:.6f}"
    path, stats = recorded(tmp_path, text, "train,streams")
    agrees(replay(read_snapshot(path), device_memory=memory), stats)


def test_a_captured_graph_has_its_own_pool(tmp_path: Path) -> None:
    path, stats = recorded(tmp_path, "", "train,graph")
    snapshot = read_snapshot(path)
    if any(entry.pool_id is None for entry in snapshot.devices[0].trace):
        pytest.skip("this version does not record the pool")
    agrees(replay(snapshot), stats)


@pytest.mark.parametrize("conf", CONFS[:3])
def test_a_history_that_begins_in_the_middle_is_replayed(tmp_path: Path, conf: str) -> None:
    path, _ = recorded(tmp_path, conf, "train,streams,empty", entries=400)
    agreement = replay(read_snapshot(path))
    assert agreement.identical or agreement.assumed, agreement.difference
    assert agreement.allocations > 0
