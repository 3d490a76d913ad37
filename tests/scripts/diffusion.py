"""Diffusion: a frozen encoder makes latents, noise and timesteps are drawn in the loop, the model predicts the noise."""

import copy
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit

STEPS = 100


class UNet(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 16 * args.width
        self.time = nn.Embedding(STEPS, wide)
        self.condition = nn.Linear(10, wide)
        self.first, self.down = nn.Conv2d(4, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(wide, wide, 2, stride=2), nn.Conv2d(2 * wide, 4, 3, padding=1)

    def forward(self, sample, timestep, encoder_hidden_states):
        about = (self.time(timestep) + self.condition(encoder_hidden_states))[:, :, None, None]
        first = F.silu(self.first(sample) + about)
        return self.last(torch.cat([first, self.up(F.silu(self.down(first)))], dim=1))


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9):
    for ema_param, param in zip(ema_model.parameters(), model.parameters()):
        ema_param.mul_(decay).add_(param.data, alpha=1 - decay)


def main():
    args = arguments(__doc__, batch_size=16)
    digits = load_digits(args)
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
    labels = F.one_hot(torch.tensor(digits.target), 10).to(images.dtype)
    # drawn for each sample, so that any division of the batch meets the same
    noises, times = torch.randn(len(images), 4, 4, 4), torch.randint(0, STEPS, (len(images),))
    loader = DataLoader(TensorDataset(images, labels, noises, times), batch_size=args.batch_size, shuffle=True)
    vae = nn.Conv2d(1, 4, 2, stride=2).eval().requires_grad_(False)
    unet = UNet(args)
    ema = copy.deepcopy(unet).requires_grad_(False)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), 0)
    #: unet, optimizer, loader = memfit.wrap(unet, optimizer, loader, target_batch=args.batch_size)

    for step, (image, condition, noise, timesteps) in enumerate(loader):
        with torch.no_grad():
            latents = vae(image) * 0.18215
        if args.as_it_comes:
            noise, timesteps = torch.randn_like(latents), torch.randint(0, STEPS, (len(latents),))
        scale = alphas[timesteps][:, None, None, None]
        noisy_latents = scale.sqrt() * latents + (1 - scale).sqrt() * noise
        model_pred = unet(noisy_latents, timesteps, encoder_hidden_states=condition)
        loss = F.mse_loss(model_pred.float() if args.dtype == "float32" else model_pred, noise, reduction="mean")
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_ema(ema, unet)
        tell(step, loss.detach().item())
        if step + 1 == args.steps:
            break
    assert os.environ.get("RANK") or torch.isfinite(loss)
    save(args, unet, ema)


if __name__ == "__main__":
    main()
