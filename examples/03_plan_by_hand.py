"""Each verb by itself: probe the memory, profile the model, plan what fits, apply the plan, verify the gradient.

    python examples/03_plan_by_hand.py

Nothing is trained until the last lines. A plan is a value: you can print, compare, save, edit and move it.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memfit


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 256, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    loader = DataLoader(data, batch_size=64)

    budget = memfit.probe(budget="256MiB")
    print(budget, end="\n\n")

    profile = memfit.profile(model, optimizer, next(iter(loader)), loss_fn=loss_fn)
    print(profile, end="\n\n")

    plan = memfit.plan(profile, budget, target_batch=2048)
    print(plan, end="\n\n")

    smaller = memfit.plan(profile, memfit.probe(budget="128MiB"), target_batch=2048)
    print("With 128 MiB instead:")
    changed = smaller.diff(plan)
    for field in ("micro_batch", "accumulation", "checkpoint"):
        if field in changed:
            print("  {}: {} instead of {}".format(field, *changed[field]))
    print()
    print(plan.export("accelerate"), end="\n\n")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        replace(plan, notes=(*plan.notes, "edited by hand")).save(path)
        run = memfit.apply(path, model, optimizer, loader, loss_fn=loss_fn)
    for batch in run.loader:
        print(f"loss {run.step(batch):.3f}")
    print(memfit.verify(run))


if __name__ == "__main__":
    main()
