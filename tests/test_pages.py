"""What tensors take where the C library gives freed memory back at once: told to the page, and seen in the kernel's figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from handmade import Course

from memfit.profiling.heap_pages import in_pages

ROOT = Path(__file__).resolve().parent.parent
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def test_large_tensors_fill_pages_and_small_ones_have_a_header() -> None:
    course = Course().birth("weights", 4096, category="parameters").window().phase("forward")
    timeline = course.birth("small", 0, 1000).birth("page", 0, 65536).birth("odd", 0, 65537).birth("none").done()
    paged = in_pages(timeline, 1, PINNED)
    assert paged.sizes(1).tolist() == [4096, 1064, 65536 + 4096, 65536 + 4096, 0]
    assert in_pages(timeline, 2, PINNED).sizes(2).tolist() == [4096, 2064, 2 * 65536 + 4096, 2 * 65537 + 4094, 0]
    assert paged.peak(1) > timeline.peak(1)


CHILD = """
import json
from pathlib import Path
import torch
from handmade import Course
from memfit.profiling.heap_pages import in_pages

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

SIZES, COUNT = (65536, 1 << 17), 1200
course = Course().birth("weights", 1, category="parameters").window().phase("forward")
for i in range(COUNT):
    course.birth(str(i), SIZES[i % len(SIZES)])
before = resident()
held = [torch.empty(SIZES[i % len(SIZES)], dtype=torch.uint8).fill_(1) for i in range(COUNT)]
timeline = course.done()
print(json.dumps([resident() - before, in_pages(timeline, 1).peak(1), timeline.peak(1)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are read from /proc")
def test_the_kernel_counts_these_pages() -> None:
    environment = {**os.environ, **PINNED, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    measured, paged, bare = json.loads(done.stdout.splitlines()[-1])
    assert abs(measured - paged) < 0.25 * (measured - bare)
