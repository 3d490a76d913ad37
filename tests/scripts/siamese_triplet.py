"""Metric learning: one network on anchors, positives and negatives, and a triplet loss over the three."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, norm, save, tell
from torch.utils.data import DataLoader, Dataset

#: import memfit


class Triplets(Dataset):
    def __init__(self, args):
        digits = load_digits(args)
        self.images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)
        self.by_label = [torch.nonzero(self.labels == digit).flatten() for digit in range(10)]

    def __len__(self):
        return len(self.labels) - 797

    def __getitem__(self, index):
        label = int(self.labels[index])
        same, other = self.by_label[label], self.by_label[(label + 1 + index % 9) % 10]
        return self.images[index], self.images[same[index % len(same)]], self.images[other[index % len(other)]]


class EmbeddingNet(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 16 * args.width
        self.features = nn.Sequential(nn.Conv2d(1, wide, 3, padding=1), norm(args, wide), nn.PReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(16 * wide, 8)

    def forward(self, x):
        return F.normalize(self.fc(self.features(x).flatten(1)), dim=1)


def main():
    args = arguments(__doc__, batch_size=24)
    loader = DataLoader(Triplets(args), batch_size=args.batch_size, shuffle=True)
    model = EmbeddingNet(args)
    criterion = nn.TripletMarginLoss(margin=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    model.train()
    losses = []
    for step, (anchor, positive, negative) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(anchor), model(positive), model(negative))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        scheduler.step()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    print(f"mean loss {sum(losses) / len(losses):.4f}")
    save(args, model)


if __name__ == "__main__":
    main()
