"""A script for `accelerate launch`, as test_guest_accelerate starts it: what it found goes into a JSON file on rank 0."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from accelerate.tracking import GeneralTracker, on_main_process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.integrations.accelerate import Accelerator


class Kept(GeneralTracker):
    """Keeps what is logged."""

    name, requires_logging_directory, main_process_only = "kept", False, True

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append(values)


def parts() -> tuple[nn.Module, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(52, 6, generator=generator), torch.randint(0, 3, (52,), generator=generator))
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), DataLoader(data, batch_size=4, shuffle=True)


def trained(accelerator: accelerate.Accelerator, epochs: int = 2) -> dict[str, Any]:
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps, synced = 0, True
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                synced = synced and accelerator.sync_gradients
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += 1
            accelerator.log({"loss": 1.0}, step=steps)
    with tempfile.TemporaryDirectory() as folder:
        state = [None] if accelerator.num_processes == 1 else [folder]
        if accelerator.num_processes == 1:
            accelerator.save_state(folder)
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
            accelerator.load_state(folder)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), state
    bare, run = accelerator.unwrap_model(model), getattr(accelerator, "run", None)
    found = {
        "parameters": [p.detach().flatten().tolist() for p in bare.parameters()],
        "steps": steps,
        "synced": synced,
        "rate": scheduler.get_last_lr()[0],
        "processes": accelerator.num_processes,
        "micro_batch": run.plan.micro_batch if run is not None and run.plan else None,
        "type": type(bare).__name__,
        "script_batch": None if run is None else run.script_batch,
        "another_batch": run is not None and run.report().change is not None,
    }
    accelerator.free_memory()
    found["given_back"] = "forward" not in vars(bare) or not hasattr(bare.forward, "plain")
    return found


def main(how: str, path: str) -> None:
    tracker = Kept()
    settings: dict[str, Any] = {"micro_batch": 3, "log_with": tracker}
    if how == "plain":
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, log_with=tracker)
    elif how == "accumulating":  # 4 samples x 2 x the processes
        accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
    else:
        accelerator = Accelerator(target_batch=16, **settings)
    accelerator.init_trackers("test")
    try:
        found = trained(accelerator)
    except memfit.MemfitError as error:
        found = {"error": str(error)}
    if accelerator.is_main_process:
        found["logged"] = sorted(tracker.logged[-1]) if tracker.logged else []
        with open(path, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
