"""Memory runs out once, at a random allocation of planning or of the first steps; benchmarks/faults_cuda.py is the campaign."""

from __future__ import annotations

import pytest
from injected import CASES, faults, met, sampled


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_memory_may_run_out_while_planning_and_while_training(part: float) -> None:
    want = met(CASES[3], None)
    assert not list(faults(want, met(CASES[3], int(part * want.allocations))))


@pytest.mark.slow
def test_memory_may_run_out_at_any_allocation() -> None:
    found = [fault for want, got in sampled(200) for fault in faults(want, got)]
    assert not found, "\n".join(found)
