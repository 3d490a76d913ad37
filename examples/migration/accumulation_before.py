"""Gradient accumulation by hand: an optimizer step every 4 iterations of 16 digits.

    python examples/migration/accumulation_before.py

Pass a path to save the parameters there.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(checkpoint: str = "") -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)

    for _ in range(3):
        for i, (pixels, digits) in enumerate(loader):
            pixels, digits = pixels.to(device), digits.to(device)
            loss = F.cross_entropy(model(pixels), digits) / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    with torch.no_grad():
        right = model(data.tensors[0].to(device)).argmax(1).cpu() == data.tensors[1]
    print(f"{right.float().mean():.1%} of the digits right")
    if checkpoint:
        torch.save(model.state_dict(), checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
