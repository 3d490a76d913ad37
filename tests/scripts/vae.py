"""A variational autoencoder: reconstruction and divergence, both summed over the batch, and added."""

import torch
import torch.nn.functional as F
from common import arguments, load_digits, save, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

#: import memfit


class VAE(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 64 * args.width
        self.fc1 = nn.Linear(64, wide)
        self.fc21 = nn.Linear(wide, 8)
        self.fc22 = nn.Linear(wide, 8)
        self.fc3 = nn.Linear(8, wide)
        self.fc4 = nn.Linear(wide, 64)
        self.as_it_comes = args.as_it_comes

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar, eps):
        return mu + (torch.randn_like(mu) if self.as_it_comes else eps) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, eps):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar, eps)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def main():
    args = arguments(__doc__, batch_size=32)
    images = torch.tensor(load_digits(args).images, dtype=torch.get_default_dtype()) / 16
    noise = torch.randn(len(images), 8)
    loader = DataLoader(TensorDataset(images, noise), batch_size=args.batch_size, shuffle=True)
    model = VAE(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    model.train()
    train_loss = 0
    for step, (data, eps) in enumerate(loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data, eps)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    print(f"average loss: {train_loss / args.steps / args.batch_size:.4f}")
    model.eval()
    with torch.no_grad():
        sample = model.decode(torch.randn(16, 8))
    print(f"a sample's mean is {sample.mean().item():.4f}")
    save(args, model)


if __name__ == "__main__":
    main()
