"""Hugging Face accelerate with one import changed.

    python examples/05_accelerate.py
    accelerate launch --num_processes 2 examples/05_accelerate.py

On a machine without GPUs, accelerate starts several processes only if told so: ACCELERATE_USE_CPU=true accelerate launch
--multi_gpu --num_processes 2 ...

The loop is that of accelerate's documentation. One iteration is one optimizer step over 128 digits, on any number of
processes.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(target_batch=128)
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(labels))
    training, held_out = torch.utils.data.random_split(data, (0.9, 0.1))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(training, batch_size=16, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=65)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    evaluation = accelerator.prepare(DataLoader(held_out, batch_size=64))

    for epoch in range(5):
        model.train()
        for pixels, digits in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(pixels), digits)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        with torch.no_grad():
            for pixels, digits in evaluation:
                guess, truth = accelerator.gather_for_metrics((model(pixels).argmax(1), digits))
                right.append((guess == truth).float())
        rate = scheduler.get_last_lr()[0]
        accelerator.print(f"epoch {epoch}: {torch.cat(right).mean():.1%} of held-out digits right, learning rate {rate:.1e}")


if __name__ == "__main__":
    main()
