"""Two tasks on one backbone: a dict of outputs, several losses with factors, and a penalty on the weights."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit


class MultiTask(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 64 * args.width
        first, second = nn.Linear(64, wide), nn.Linear(wide, wide)
        self.backbone = nn.Sequential(first, nn.ReLU(), nn.Dropout(args.dropout), second, nn.ReLU())
        self.digit, self.ink = nn.Linear(wide, 10), nn.Linear(wide, 8)

    def forward(self, x):
        h = self.backbone(x)
        return {"digit": self.digit(h), "ink": self.ink(h)}


def main():
    args = arguments(__doc__, batch_size=32)
    digits = load_digits(args)
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()) / 16
    ink = images.mean(2)
    known = ink > 0.1
    data = TensorDataset(images.flatten(1), torch.tensor(digits.target), ink, known)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = MultiTask(args)
    weights = torch.linspace(0.5, 1.5, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    running = {"digit": 0.0, "ink": 0.0}
    for step, (x, digit, row_ink, mask) in enumerate(loader):
        optimizer.zero_grad()
        out = model(x)
        digit_loss = F.cross_entropy(out["digit"], digit, weight=weights, label_smoothing=0.1)
        per_row = F.smooth_l1_loss(out["ink"], row_ink, reduction="none")
        ink_loss = (per_row * mask).sum() / mask.sum().clamp(min=1)
        penalty = sum(p.abs().sum() for p in model.parameters())
        loss = digit_loss + 0.5 * ink_loss + 1e-5 * penalty
        loss.backward()
        optimizer.step()
        running["digit"] += digit_loss.item()
        running["ink"] += ink_loss.item()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    print({name: round(value / args.steps, 4) for name, value in running.items()})
    save(args, model)


if __name__ == "__main__":
    main()
