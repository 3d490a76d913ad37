"""Contrastive pre-training: two views of each picture side by side in one batch, every other view in it a negative."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, norm, save, tell
from torch.utils.data import DataLoader, Dataset

#: import memfit


class TwoViews(Dataset):
    def __init__(self, args):
        digits = load_digits(args)
        images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
        self.images, self.labels = F.interpolate(images, scale_factor=args.width), torch.tensor(digits.target)

    def __len__(self):
        return len(self.labels) - 297

    def view(self, image, generator):
        shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
        image = torch.roll(image, shift, dims=(1, 2)) * (0.6 + 0.4 * torch.rand(1, generator=generator))
        return (image + 0.1 * torch.randn(image.shape, generator=generator)).clamp(0, 1)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return [self.view(self.images[index], generator) for _ in range(2)], self.labels[index]


class SimCLR(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 16 * args.width
        self.encoder = nn.Sequential(
            nn.Conv2d(1, wide, 3, padding=1), norm(args, wide), nn.ReLU(), nn.Conv2d(wide, 2 * wide, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.projector = nn.Sequential(nn.Linear(8 * wide, 64), nn.ReLU(), nn.Linear(64, 16, bias=False))

    def forward(self, x):
        return self.projector(self.encoder(x))


def nt_xent(features, temperature=0.5):
    z = F.normalize(features, dim=1)
    similarity = z @ z.t() / temperature
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = similarity.masked_fill(itself, float("-inf"))
    positives = torch.arange(len(z), device=z.device).roll(len(z) // 2)  # the other view of the same picture
    return F.cross_entropy(similarity, positives), similarity, positives


def nearest_neighbours(model, dataset, n=10):
    model.eval()
    with torch.no_grad():
        h = F.normalize(model.encoder(dataset.images[:60]), dim=1)
    nearest = (h[-n:] @ h[:-n].t()).argmax(1)
    print(f"nearest neighbours: {int((dataset.labels[:50][nearest] == dataset.labels[50:60]).sum())} of {n}")


def main():
    args = arguments(__doc__, batch_size=24)
    dataset = TwoViews(args)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = SimCLR(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    model.train()
    right = 0
    for step, (images, _) in enumerate(loader):
        images = torch.cat(images, dim=0)
        features = model(images)
        loss, similarity, positives = nt_xent(features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        right += (similarity.argmax(dim=1) == positives).sum().item()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    print(f"found the other view: {right} of {args.steps * 2 * args.batch_size}")
    nearest_neighbours(model, dataset)
    save(args, model)


if __name__ == "__main__":
    main()
