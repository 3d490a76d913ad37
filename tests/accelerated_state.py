"""A script for `accelerate launch`, as test_guest_accelerate_state starts it: it trains up to a step, and saves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerated import parts

import memfit
from memfit.integrations.accelerate import Accelerator


def main(folder: str, stop: int, micro_batch: int, how: str) -> None:
    accelerator = Accelerator(target_batch=16, micro_batch=micro_batch)
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    saved, done = Path(folder) / "state", 0
    if saved.exists():
        try:
            accelerator.load_state(str(saved))
        except memfit.UsageError as error:
            Path(folder, "error").write_text(str(error))
            return
        done = json.loads(Path(folder, "found.json").read_text())["steps"]
    first_epoch, skipped = divmod(done, len(loader))  # as accelerate's examples count
    for epoch in range(first_epoch, 100):
        skips = how == "skipping" and epoch == first_epoch
        batches = accelerator.skip_first_batches(loader, skipped) if skips else loader
        assert len(batches) == len(loader) - (skipped if skips else 0)
        for x, y in batches:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done == stop:
                accelerator.save_state(str(saved))
                if accelerator.is_main_process:
                    parameters = [p.detach().flatten().tolist() for p in accelerator.unwrap_model(model).parameters()]
                    found = {"steps": done, "parameters": parameters, "files": sorted(p.name for p in saved.iterdir())}
                    Path(folder, "found.json").write_text(json.dumps(found))
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
