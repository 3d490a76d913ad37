"""A training that survives the loss of its processes, and continues with more or fewer of them.

    python examples/06_elastic.py
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 examples/06_elastic.py

Stop it at any step and start it again on any number of processes, or kill a process and let torchrun restart it. It
continues with the next batch of the interrupted epoch, and ends with the same parameters as without the interruption.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memfit

STATE = Path(os.environ.get("STATE", "state.pt"))
EPOCHS, EVERY = 20, 4


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def save(state: dict) -> None:
    """Saves atomically: a process killed meanwhile leaves the previous file."""
    part = STATE.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, STATE)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 320)
    x = torch.randn(1000, 8)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=16, shuffle=True)
    run = memfit.wrap(model, optimizer, loader, loss_fn=loss_fn, target_batch=64, micro_batch=16)
    if STATE.exists():
        state = torch.load(STATE, weights_only=True)
        run.load_state_dict(state["run"])
        scheduler.load_state_dict(state["scheduler"])

    first = os.environ.get("RANK", "0") == "0"
    for epoch in range(run.loader.epoch, EPOCHS):
        for batch in run.loader:
            loss = run.step(batch)
            scheduler.step()
            step = run.stats()["step"]
            if first and step % EVERY == 0:
                save({"run": run.state_dict(), "scheduler": scheduler.state_dict()})
                print(f"step {step} of epoch {epoch}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
