"""DistributedDataParallel by hand: 32 digits on each process.

    torchrun --nproc_per_node=2 examples/migration/ddp_before.py

Pass a path to save the parameters there.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(checkpoint: str = "") -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(labels))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for pixels, digits in loader:
            pixels, digits = pixels.to(device), digits.to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(pixels), digits).backward()
            optimizer.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            right = model.module(data.tensors[0].to(device)).argmax(1).cpu() == data.tensors[1]
        print(f"{right.float().mean():.1%} of the digits right")
        if checkpoint:
            torch.save(model.module.state_dict(), checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
