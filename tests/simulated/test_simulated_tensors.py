"""Tensors of the simulated device: made, moved, indexed, written, saved; and what is refused as by CUDA."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import simcuda
import torch
import torch.nn.functional as F
from nets import near
from torch import Tensor, nn


def test_values_views_and_dtypes_are_the_hosts() -> None:
    x = torch.arange(12.0, device="cuda").view(3, 4)
    assert x.device == torch.device("cuda:0") and x.is_cuda and x.dtype == torch.float32
    assert "device='cuda:0'" in repr(x)
    y = x.t().contiguous()[1:, ::2]
    assert y.device == x.device and y.tolist() == x.cpu().t().contiguous()[1:, ::2].tolist()
    x[0] = 7
    x[x > 9] = -1
    x.add_(1).mul_(x[:, :1])
    assert x.untyped_storage().data_ptr() == x.view(-1).untyped_storage().data_ptr()
    assert torch.stack([x, x]).sum().item() == pytest.approx(2 * x.cpu().sum().item())
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        assert x.to(dtype).cpu().equal(x.cpu().to(dtype))
    near(torch.sort(x, dim=1)[0], torch.sort(x.cpu(), dim=1)[0])
    assert torch.unique(torch.tensor([1, 1, 2], device="cuda")).tolist() == [1, 2]
    assert torch.empty(0, device="cuda").sum().item() == 0
    assert copy.deepcopy(x).equal(x)


def test_outputs_that_are_resized() -> None:
    found = torch.empty(0, dtype=torch.long, device="cuda")
    torch.nonzero(torch.tensor([0, 1, 1], device="cuda"), out=found)
    assert found.tolist() == [[1], [2]]
    out = torch.empty(0, device="cuda")
    torch.cat([torch.ones(2, device="cuda"), torch.zeros(3, device="cuda")], out=out)
    assert out.tolist() == [1, 1, 0, 0, 0] and out.is_cuda
    out.resize_(100).fill_(2)
    assert out.sum().item() == 200


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_devices_do_not_mix(other: str) -> None:
    x, y = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device=other)
    mixed: list[Callable[[], Tensor]] = [
        lambda: x + y,
        lambda: x @ y,
        lambda: F.cross_entropy(x, y),
        lambda: torch.cat([x, y]),
    ]
    for each in mixed:
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            each()


def test_numbers_and_indices_may_be_the_hosts() -> None:
    x = torch.ones(2, 2, device="cuda")
    assert (x + torch.tensor(1.0)).is_cuda
    assert x[torch.tensor([0, 1])].is_cuda


@pytest.mark.parametrize("where", [None, "cpu", "cuda:0"])
def test_saving_and_loading(where: str | None) -> None:
    x, file = torch.arange(5.0, device="cuda:1"), io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    back = torch.load(file, map_location=where)["x"]
    assert back.device == torch.device(where or "cuda:1") and back.tolist() == x.tolist()


def test_storages_made_by_themselves() -> None:
    made = torch.UntypedStorage(8, device="cuda:1")
    assert made.device == torch.device("cuda:1") and made.nbytes() == 8
    assert torch.UntypedStorage([1, 2, 3], device="cuda").cpu().tolist() == [1, 2, 3]


def test_fake_tensors_take_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.cuda.memory_allocated()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = nn.Sequential(nn.Linear(1000, 1000, device="cuda"), nn.LayerNorm(1000, device="cuda"), nn.Dropout(0.1))
        x = torch.randn(1000, 1000, device="cuda", requires_grad=True)
        out = fake(x).sum()
        out.backward()
        assert out.device == torch.device("cuda:0") and x.grad is not None and x.grad.device.type == "cuda"
        assert torch.randn(3, device="cuda:1").device.index == 1
        real = mode.from_tensor(torch.ones(2, 2).to("cuda"))
        assert (real @ real).device.type == "cuda"
    assert torch.cuda.memory_allocated() - before <= 1024


def test_pinned_memory_is_copied_without_waiting() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.arange(20))
    loader = torch.utils.data.DataLoader(data, batch_size=5, pin_memory=True, num_workers=1)
    simcuda.reset_counters()
    for x, y in loader:
        assert x.is_pinned() and y.is_pinned()
        x.to("cuda", non_blocking=True), y.cuda(non_blocking=True)
    assert simcuda.counters()["syncs"] == 0 and simcuda.counters()["h2d"] == 8
    x.to("cuda")
    assert simcuda.counters()["syncs"] == 1
    assert not torch.ones(3).is_pinned() and torch.ones(3).pin_memory().is_pinned()


def test_graphs_and_private_pools_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="has no CUDA graphs"):
        torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="no private memory pools"):
        torch.cuda.MemPool()
