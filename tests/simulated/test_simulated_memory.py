"""Memory of the simulated device: what is counted, what is cached, and what runs out."""

from __future__ import annotations

import pytest
import simcuda
import torch
from torch import Tensor, nn

MiB = 1 << 20


def taken(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.uint8, device="cuda")


def test_blocks_and_segments_are_counted() -> None:
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated() == 0
    x = torch.empty(1000, device="cuda")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (4096, 2 * MiB)
    y = taken(5 * MiB)
    assert torch.cuda.memory_reserved() == 22 * MiB
    z = taken(15 * MiB + 1)  # not into the 15 MiB left of 20; all of a segment of 16
    assert torch.cuda.memory_allocated() == 4096 + 5 * MiB + 16 * MiB
    assert torch.cuda.memory_reserved() == 22 * MiB + 16 * MiB
    del y, z
    assert torch.cuda.memory_reserved() == 38 * MiB and torch.cuda.max_memory_allocated() > 16 * MiB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 2 * MiB and torch.cuda.memory_stats()["allocation.all.current"] == 1
    assert torch.cuda.mem_get_info() == ((4 << 30) - 2 * MiB, 4 << 30)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_reserved() == torch.accelerator.memory_reserved() == 2 * MiB
    assert "CUDA OOMs" in torch.cuda.memory_summary()
    del x


def test_it_runs_out_and_gives_up_the_cache_first() -> None:
    simcuda.set_capacity("200MiB")
    before = torch.cuda.memory_stats()
    held = taken(150 * MiB)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 100\.00 MiB\. GPU 0 has a total"):
        taken(100 * MiB)
    after = torch.cuda.memory_stats()
    assert after["num_ooms"] - before["num_ooms"] == 1 == after["num_alloc_retries"] - before["num_alloc_retries"]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.ones(60 * MiB, dtype=torch.uint8, device="cuda") + 1
    del held
    assert taken(180 * MiB).is_cuda


def test_other_processes_and_a_fraction_leave_less() -> None:
    simcuda.set_capacity("200MiB")
    simcuda.set_others("150MiB")
    assert torch.cuda.mem_get_info() == (50 * MiB, 200 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        taken(100 * MiB)
    simcuda.set_others(0)
    torch.cuda.set_per_process_memory_fraction(0.5)
    with pytest.raises(torch.OutOfMemoryError, match=r"100\.00 MiB allowed"):
        taken(120 * MiB)
    assert torch.cuda.mem_get_info() == (200 * MiB, 200 * MiB)


def test_a_chosen_allocation_fails() -> None:
    simcuda.fail_in(1)
    torch.empty(1, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="cuda")
    torch.empty(1, device="cuda")


def test_it_runs_out_in_backward_and_training_goes_on() -> None:
    simcuda.set_capacity("120MiB")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]).cuda()

    def step(n: int) -> None:
        model(torch.randn(n, 256, device="cuda")).pow(2).mean().backward()

    step(64)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            step(8192)
        model.zero_grad()
        step(64)
    simcuda.fail_in(40)
    with pytest.raises(torch.OutOfMemoryError):
        step(64)
    assert torch.cuda.max_memory_reserved() <= 120 * MiB


def test_history_and_blocks_used_by_another_stream() -> None:
    torch.cuda.memory._record_memory_history(context=None)
    side = torch.cuda.Stream()
    x = taken(3 * MiB)
    x.record_stream(side)
    del x
    stats = torch.cuda.memory_stats()
    assert stats["active.all.current"] == stats["allocation.all.current"] + 1
    y = taken(3 * MiB)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed", "alloc", "snapshot"][: len(actions)]
    there = [segment["total_size"] for segment in snapshot["segments"] if segment["device"] == 0]
    assert sum(there) == torch.cuda.memory_reserved()
    assert y.is_cuda


def test_matrix_products_hold_a_workspace_per_thread_and_stream() -> None:
    x = torch.ones(4, 4, device="cuda", requires_grad=True)
    before, mine = torch.cuda.memory_allocated(), 8 * MiB + 128 * 1024
    out = (x @ x).sum()
    out = out.detach() if torch.cuda.memory_allocated() < before + mine else out
    assert out.requires_grad
    with torch.cuda.stream(torch.cuda.Stream()):
        _ = x.detach() @ x.detach()
    assert 2 * mine <= torch.cuda.memory_allocated() - before < 3 * mine
    out.backward()  # a thread of autograd's multiplies, too
    assert 3 * mine <= torch.cuda.memory_allocated() - before < 4 * mine
    del out
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    assert torch.cuda.memory_allocated() - before < mine
