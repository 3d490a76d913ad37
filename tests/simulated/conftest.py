"""Tests of the simulated device itself, in processes where it is there: tests/test_simulated.py starts them, or

    python -m tests.simcuda --devices 2 -m pytest tests/simulated
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if "SIMCUDA" in os.environ else ["*"]


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    """Each test begins with empty devices of 4 GiB."""
    import simcuda
    import torch

    before = [torch.cuda.get_device_properties(device).total_memory for device in range(torch.cuda.device_count())]
    for device in range(len(before)):
        simcuda.set_capacity("4GiB", device)
        simcuda.set_others(0, device)
        simcuda.fail_in(-1, device)
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    simcuda.reset_counters()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_per_process_memory_fraction(1.0)
    for device, capacity in enumerate(before):
        simcuda.set_capacity(capacity, device)
    # What a failing test's traceback holds would count for the next one.
    sys.last_traceback = None
