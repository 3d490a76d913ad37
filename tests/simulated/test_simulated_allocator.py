"""The simulated device's allocator against memfit's own simulation of CUDA's: random programs, segment by segment.

Neither has seen the other's code; what both are held against is what real devices recorded (tests/test_allocator.py).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import simcuda
import torch

from memfit.allocators.caching import CachingAllocator
from memfit.allocators.events import Exhausted
from memfit.allocators.layout import layout_of
from memfit.allocators.settings import AllocatorSettings
from memfit.allocators.snapshot import parse_snapshot, read_snapshot

MiB = 1 << 20
CAPACITY = 400 * MiB
CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "max_split_size_mb:64,max_non_split_rounding_mb:64",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,8:8,>:4]",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.6",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9,max_split_size_mb:32",
    "large_segment_size_mb:32",
    "large_segment_size_mb:12,expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:40,roundup_power2_divisions:2",
]
PLAIN = "large_segment_size_mb:20,max_split_size_mb:17592186044415,max_non_split_rounding_mb:20,roundup_power2_divisions:1,"
PLAIN += "expandable_segments:False,garbage_collection_threshold:0.999"

core: Any = torch._C
streams = count(1)
"""Each program has streams of its own: addresses that were reserved for another one's stay that stream's."""


@pytest.fixture(params=CONFS)
def conf(request: pytest.FixtureRequest) -> Iterator[str]:
    """Settings in force on the device; large segments have their size first, as others are checked against it."""
    settings = AllocatorSettings.from_text(request.param)
    text = ",".join(part for part in _parts(request.param) if not part.startswith("per_process"))
    core._accelerator_setAllocatorSettings(text)
    torch.cuda.set_per_process_memory_fraction(settings.per_process_memory_fraction)
    yield request.param
    torch.cuda.empty_cache()
    core._accelerator_setAllocatorSettings(PLAIN)


def _parts(conf: str) -> list[str]:
    return conf.split(",") if "[" not in conf else [conf]


class Both:
    """The same program on both; what one raises the other raises."""

    def __init__(self, conf: str, request: pytest.FixtureRequest) -> None:
        request.addfinalizer(self.end)
        simcuda.set_capacity(CAPACITY)
        self.mine = CachingAllocator(AllocatorSettings.from_text(conf), CAPACITY)
        self.device: Any = simcuda.native()
        self.live: list[tuple[int, int]] = []
        self.streams = [next(streams) for _ in range(3)]

    def allocate(self, size: int, stream: int) -> None:
        try:
            there = self.device.raw_allocate(size, 0, stream)
        except torch.OutOfMemoryError:
            with pytest.raises(Exhausted):
                self.mine.malloc(size, stream)
            return
        self.live.append((there, self.mine.malloc(size, stream)))

    def free(self, at: int) -> None:
        there, mine = self.live.pop(at)
        self.device.raw_free(there)
        self.mine.free(mine)

    def use(self, at: int, stream: int) -> None:
        there, mine = self.live[at]
        self.device.record_stream(there, 0, stream)
        self.mine.used_on(mine, stream)

    def end_of_step(self) -> None:
        """On the simulated device whatever was launched is done."""
        for stream in self.streams:
            self.mine.complete(stream)

    def end(self) -> None:
        while self.live:
            self.free(0)

    def layouts(self) -> list[list[Any]]:
        """Of each: segments in the order of their addresses, with their blocks, but for the addresses."""
        found = []
        for views in (parse_snapshot(torch.cuda.memory._snapshot()).devices[0].segments, layout_of(self.mine)):
            found.append(
                [(s.size, s.stream, s.small, s.expandable, [(b.size, b.requested, b.state) for b in s.blocks]) for s in views]
            )
        return found


def size_of(random_: random.Random) -> int:
    small, middle, large = random_.randint(1, MiB), random_.randint(MiB, 12 * MiB), random_.randint(12 * MiB, 90 * MiB)
    return random_.choice((small, small, middle, large))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_random_programs_take_the_same_segments(conf: str, seed: int, request: pytest.FixtureRequest) -> None:
    drawn, both = random.Random(f"{conf}{seed}"), Both(conf, request)
    for step in range(600):
        choice = drawn.random()
        if both.live and choice < 0.47:
            both.free(drawn.randrange(len(both.live)))
        elif both.live and choice < 0.52:
            both.use(drawn.randrange(len(both.live)), drawn.choice(both.streams))
        elif choice < 0.525:
            torch.cuda.empty_cache()
            both.mine.empty_cache()
        else:
            both.allocate(size_of(drawn), both.streams[drawn.choice((0, 0, 0, 1, 2))])
        both.end_of_step()
        stats = torch.cuda.memory_stats()
        assert (stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]) == (
            both.mine.reserved,
            both.mine.allocated,
        ), step
        if step % 20 == 0:
            there, mine = both.layouts()
            assert there == mine, step
    both.end()
    assert torch.cuda.memory_allocated() == 0


def test_the_programs_run_out_of_memory(conf: str, request: pytest.FixtureRequest) -> None:
    """Otherwise the law above holds of what is easy alone."""
    both, before = Both(conf, request), torch.cuda.memory_stats()["num_ooms"]
    for _ in range(8):
        both.allocate(70 * MiB, both.streams[0])
    assert torch.cuda.memory_stats()["num_ooms"] - before == both.mine.failures > 0


def test_snapshots_are_read_wherever_their_frames_begin(tmp_path: Path) -> None:
    """Pickles of more than 64 KiB are cut into frames, between any two values."""
    torch.cuda.memory._record_memory_history(context=None)
    for _ in range(500):
        torch.empty(1000, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    path = tmp_path / "snapshot.pickle"
    for length in range(0, 120, 3):
        path.write_bytes(pickle.dumps({"note": "x" * length, **snapshot}))
        assert len(read_snapshot(path).devices[0].trace) >= 1500
