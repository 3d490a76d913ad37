"""A generative adversarial network: two models and optimizers, and gradients through one into the other."""

import torch
import torch.nn as nn
from common import arguments, load_digits, norm, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit

NZ = 16


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.05)


def generator(args):
    wide = 16 * args.width
    return nn.Sequential(
        nn.ConvTranspose2d(NZ, 2 * wide, 4, 1, 0, bias=False), norm(args, 2 * wide), nn.ReLU(True),
        nn.ConvTranspose2d(2 * wide, wide, 4, 2, 1, bias=False), norm(args, wide), nn.ReLU(True),
        nn.Conv2d(wide, 1, 3, 1, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator(args):
    wide = 16 * args.width
    return nn.Sequential(
        nn.Conv2d(1, wide, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(wide, 2 * wide, 4, 2, 1, bias=False), norm(args, 2 * wide), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(2 * wide, 1, 2), nn.Sigmoid(),
    )  # fmt: skip


def main():
    args = arguments(__doc__, batch_size=24)
    images = torch.tensor(load_digits(args).images, dtype=torch.get_default_dtype()).unsqueeze(1) / 8 - 1
    noises = torch.randn(len(images), NZ, 1, 1)
    loader = DataLoader(TensorDataset(images, noises), batch_size=args.batch_size, shuffle=True)
    netG, netD = generator(args), discriminator(args)
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    #: _, _, loader = memfit.wrap([netD, netG], [optimizerD, optimizerG], loader, target_batch=args.batch_size)

    for step, (data, noise) in enumerate(loader):
        # (1) the discriminator: real, then fake
        netD.zero_grad()
        batch_size = data.size(0)
        label = torch.full((batch_size,), 1.0)
        output = netD(data).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        optimizerD.step()
        # (2) the generator
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        tell(step, (errD_real + errD_fake + errG).item() + D_x)
        if step + 1 == args.steps:
            break
    with torch.no_grad():
        print(f"a fake's mean is {netG(noises[:8]).mean().item():.4f}")
    save(args, netG, netD)


if __name__ == "__main__":
    main()
