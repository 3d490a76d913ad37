"""One process or several: the same batch, the same gradients, the same losses.

    python examples/04_torchrun.py
    torchrun --nproc_per_node=2 examples/04_torchrun.py

The script does not depend on the number of processes. Each process takes its share of every batch, and cuts it into
micro-batches that fit. Gradients are reduced once per step.
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memfit


class Bytes(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.read = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.read(self.embed(text))[0])


def library_text(length: int = 65, samples: int = 1000) -> Tensor:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[: length * samples]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).view(-1, length).long()


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (text,) = batch
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    torch.manual_seed(0)
    model = Bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(library_text()), batch_size=32, shuffle=True)
    run = memfit.wrap(
        model,
        optimizer,
        loader,
        loss_fn=loss_fn,
        target_batch=256,
        micro_batch=32,
        before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )
    first = os.environ.get("RANK", "0") == "0"
    for _ in range(3):
        for batch in run.loader:
            loss = run.step(batch)
            if first:
                print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
