"""Super-resolution: small pictures made large by sub-pixel convolution, mean squared error, PSNR of a test set."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit


class Net(nn.Module):
    def __init__(self, args, upscale_factor=2):
        super().__init__()
        wide = 16 * args.width
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, wide, 5, padding=2)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1)
        self.conv3 = nn.Conv2d(wide, upscale_factor**2, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.pixel_shuffle(self.conv3(x))


def main():
    args = arguments(__doc__, batch_size=16)
    large = torch.tensor(load_digits(args).images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
    large = F.interpolate(large, scale_factor=2 * args.width)
    small = F.avg_pool2d(large, 2)
    loader = DataLoader(TensorDataset(small[:-1297], large[:-1297]), batch_size=args.batch_size, shuffle=True)
    testing = DataLoader(TensorDataset(small[-1297:-1197], large[-1297:-1197]), batch_size=25)
    model = Net(args)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    epoch_loss = 0
    for step, (input, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        tell(step, loss.item())
        if step + 1 == args.steps:
            break
    with torch.no_grad():
        psnrs = [10 * math.log10(1 / criterion(model(x), y).item()) for x, y in testing]
    print(f"average loss {epoch_loss / args.steps:.4f}, average PSNR {sum(psnrs) / len(psnrs):.4f} dB")
    save(args, model)


if __name__ == "__main__":
    main()
