"""What the scripts of the gallery share: their arguments, what they print, and the checkpoint they leave.

Every script runs as it is: `python tests/scripts/digits_nll.py`. Its lines that begin with `#:` are the one line of memfit and
its import; without that mark the script is the wrapped one, which `tests/gallery.py` runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import sklearn.datasets
import torch
from torch import Tensor, nn


def arguments(description: str | None, batch_size: int) -> argparse.Namespace:
    """The script's arguments; `batch_size` is its own default. Attributes: steps, batch_size, width and times (factors of
    layers and of the number of samples, for trainings that are to take memory), dropout, as_it_comes, out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--as-it-comes", action="store_true", help="with dropout, batch norm and noise drawn inside the model")
    parser.add_argument("--out", type=Path, help="where the checkpoint goes")
    args = parser.parse_args()
    args.dropout = 0.1 if args.as_it_comes else 0.0
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(0)
    return args


def load_digits(args: argparse.Namespace) -> SimpleNamespace:
    """Handwritten digits, each `args.times` times: data [n, 64] and images [n, 8, 8] of 0 to 16, target [n]."""
    found = sklearn.datasets.load_digits()
    repeated = {name: np.concatenate([found[name]] * args.times) for name in ("data", "images", "target")}
    return SimpleNamespace(**repeated)


def norm(args: argparse.Namespace, channels: int) -> nn.Module:
    """Batch norm where the script runs as it comes, else group norm, which does not mix samples."""
    return nn.BatchNorm2d(channels) if args.as_it_comes else nn.GroupNorm(4, channels)


def tell(step: int, loss: Tensor | float) -> None:
    """A line of the log, with all digits, by the first process."""
    if first():
        sys.stdout.write(f"step {step} loss {loss.item() if isinstance(loss, Tensor) else loss!r}\n")


def first() -> bool:
    """Whether this is the first process, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def save(args: argparse.Namespace, *modules: nn.Module) -> None:
    """The checkpoint, by the first process."""
    if args.out is not None and first():
        torch.save([module.state_dict() for module in modules], args.out)
