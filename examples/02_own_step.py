"""memfit makes the step: it collates each micro-batch by itself, and a step survives running out of memory.

    python examples/02_own_step.py

Lines of the standard library differ in length, so samples are padded. memfit groups lines of similar length.
"""

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import memfit

PADDING = -100


class Lines(nn.Module):
    """Predicts the next byte of a line."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, width)
        self.read = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.read(self.embed(text))[0])


def library_lines(most: int = 4096) -> list[Tensor]:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = [line for path in sources for line in path.read_bytes().splitlines() if len(line) > 8]
    return [torch.frombuffer(bytearray(line[:240]), dtype=torch.uint8).long() for line in lines[:most]]


def collate(lines: Sequence[Tensor]) -> dict[str, Tensor]:
    text = pad_sequence([line[:-1] for line in lines], batch_first=True, padding_value=256)
    labels = pad_sequence([line[1:] for line in lines], batch_first=True, padding_value=PADDING)
    return {"text": text, "labels": labels}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["text"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=PADDING)


def training() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, Callable[[nn.Module, dict[str, Tensor]], Tensor]]:
    """Returns what to train; `memfit plan examples/02_own_step.py:training` plans it without training."""
    torch.manual_seed(0)
    model = Lines()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(library_lines(), batch_size=64, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    return model, optimizer, loader, loss_fn


def main() -> None:
    model, optimizer, loader, _ = training()
    run = memfit.wrap(
        model,
        optimizer,
        loader,
        loss_fn=loss_fn,
        target_batch=512,
        budget="512MiB",
        before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )
    for batch in run.loader:
        loss = run.step(batch)
        print(f"loss {loss:.3f}   {run.stats()['samples_per_second']:.0f} lines/s")
    print(memfit.verify(run))
    print()
    print(run.report())


if __name__ == "__main__":
    main()
