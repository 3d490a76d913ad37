"""The demo's training task, identical in each of its processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from memfit._errors import UsageError
from memfit.demo.model import ByteGPT, Shape
from memfit.demo.text import LibraryText


@dataclass(frozen=True)
class Demo:
    """The demo's settings."""

    budget: int
    """Bytes that the training may take."""
    steps: int | None
    """Optimizer steps; None for as many as fit into `seconds`."""
    report: str
    """Path of the HTML report."""
    target: int = 256
    """Effective batch: sequences per optimizer step."""
    seconds: float = 75.0
    """Seconds of training where `steps` is None."""
    shape: Shape = field(default_factory=Shape)
    """The model's dimensions."""

    def to_json(self) -> str:
        """Return the settings as JSON, to pass to another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Demo:
        """Read settings that another process passed as JSON."""
        fields = json.loads(text)
        return Demo(**{**fields, "shape": Shape(**fields["shape"])})


@dataclass(frozen=True)
class Training:
    """The objects that a training script has before its loop."""

    model: nn.Module
    """The GPT."""
    optimizer: AdamW
    """Its optimizer."""
    loader: DataLoader[Any]
    """Batches of the target size."""


def check_report_path(path: Path) -> Path:
    """Return `path` if its suffix is .html and its folder exists. Raises UsageError otherwise."""
    asked = f"the demo's report in {str(path)!r}"
    if path.suffix.lower() != ".html":
        raise UsageError(asked, found=f"the suffix is {path.suffix!r}", next_move="end the name in .html")
    if not path.absolute().parent.is_dir():
        raise UsageError(asked, found="its folder does not exist", next_move="make it, or name another with --report")
    return path


def training(demo: Demo, text: LibraryText, device: torch.device) -> Training:
    """Build the training, from the same seed in every process."""
    torch.manual_seed(0)
    model = ByteGPT(demo.shape).to(device)
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    order = torch.Generator().manual_seed(0)
    return Training(model, optimizer, DataLoader(text, batch_size=demo.target, shuffle=True, drop_last=True, generator=order))
