"""A script for launchers: a small training by memfit, as a script for one process would write it. `main(path)` writes what the
first process found as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit

TARGET = 16


def parts() -> tuple[nn.Module, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(52, 6, generator=generator), torch.randint(0, 3, (52,), generator=generator))
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), DataLoader(data, batch_size=4, shuffle=True)


def main(path: str) -> None:
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=TARGET, micro_batch=3)
    steps = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    joined = dist.is_initialized()
    if not joined or dist.get_rank() == 0:
        found = {
            "parameters": [p.detach().flatten().tolist() for p in model.parameters()],
            "steps": steps,
            "processes": dist.get_world_size() if joined else 1,
        }
        with open(path, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
