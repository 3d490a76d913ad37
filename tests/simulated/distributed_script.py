"""A script for torchrun: collectives, DistributedDataParallel and memfit, each process on a device of its own.

The first process prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import memfit


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double().cuda()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(52, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (52,), generator=generator)
    return TensorDataset(x, y)


def collectives(rank: int, size: int) -> list[Any]:
    """Of each sort one, so that a number says whether it is right."""
    mine = torch.full((2,), float(rank + 1), device="cuda")
    total = mine.clone()
    dist.all_reduce(total)
    gathered = torch.empty(2 * size, device="cuda")
    dist.all_gather_into_tensor(gathered, mine)
    first = mine.clone()
    dist.broadcast(first, 0)
    part = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(part, torch.arange(float(size), device="cuda"))
    dist.barrier()
    assert all(each.device.index == rank for each in (total, gathered, first, part))
    return [each.tolist() for each in (total, gathered, first, part)]


def wrapped_gradient(rank: int, size: int) -> Tensor:
    """Of a batch of which every process has a part, by DistributedDataParallel."""
    model = DistributedDataParallel(net(), device_ids=[rank])
    x, y = data()[rank : 8 : size]
    F.cross_entropy(model(x.cuda()), y.cuda()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained() -> Tensor:
    """The parameters after two epochs by memfit, as a script for one process would write it."""
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    loader: Any = DataLoader(data(), batch_size=4, shuffle=True)
    model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=16, micro_batch=3)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    if size > 1:
        dist.init_process_group("nccl")
    found = {
        "collectives": collectives(rank, size) if size > 1 else None,
        "gradient": wrapped_gradient(rank, size).tolist() if size > 1 else None,
        "parameters": trained().tolist(),
    }
    if rank == 0:
        print(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
