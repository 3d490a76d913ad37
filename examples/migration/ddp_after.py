"""The same with memfit: 64 digits over any number of processes.

    python examples/migration/ddp_after.py
    torchrun --nproc_per_node=2 examples/migration/ddp_after.py

Pass a path to save the parameters there.
"""

import os
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import memfit


def main(checkpoint: str = "") -> None:
    torch.manual_seed(0)
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # shuffle=True is enough; this sampler draws the order of DistributedSampler, so both scripts train the same
    order = torch.Generator()
    loader = DataLoader(data, batch_size=32, sampler=RandomSampler(data, generator=order), drop_last=True)
    model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=64)  # 32 on each of 2 processes before

    for epoch in range(3):
        order.manual_seed(epoch)
        for pixels, digits in loader:
            pixels, digits = pixels.to(device), digits.to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(pixels), digits).backward()
            optimizer.step()

    if os.environ.get("RANK", "0") == "0":
        with torch.no_grad():
            right = model(data.tensors[0].to(device)).argmax(1).cpu() == data.tensors[1]
        print(f"{right.float().mean():.1%} of the digits right")
        if checkpoint:
            torch.save(model.state_dict(), checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
