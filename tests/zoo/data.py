"""Synthetic samples that can be learnt: stripes whose frequency is the class, sequences that count, noise on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

PAD = 0
IGNORED = -100


class Samples(Dataset):
    """Draws sample i when asked, from a generator of its own: no memory held, and the same samples in any order."""

    def __init__(self, make: Callable[[torch.Generator], Any], n: int, dtype: torch.dtype, seed: int) -> None:
        self.make, self.n, self.dtype, self.seed = make, n, dtype, seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(f"sample {index} of {self.n}")
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return _cast(self.make(generator), self.dtype)


def draw(low: int, high: int, generator: torch.Generator) -> int:
    """A random int in [low, high)."""
    return int(torch.randint(low, high, (), generator=generator))


def cloud(label: int, width: int, generator: torch.Generator) -> Tensor:
    """A vector around the centre of its class."""
    centre = torch.cos((label + 1) * torch.arange(width))
    return centre + 0.5 * torch.randn(width, generator=generator)


def stripes(label: int, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """An image whose stripes are the finer the higher its class, at a random phase."""
    across, down = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    phase = 0.5 * torch.rand((), generator=generator)
    waves = [torch.sin(2 * torch.pi * ((label + 1) * (across + c * down) + phase)) for c in range(channels)]
    return torch.stack(waves) + 0.1 * torch.randn(channels, side, side, generator=generator)


def counting(vocabulary: int, length: int, step: int, generator: torch.Generator) -> Tensor:
    """Tokens in 1..vocabulary-1 that count upwards by `step`, one in ten replaced by noise; PAD does not occur."""
    start = draw(0, vocabulary - 1, generator)
    tokens = 1 + (start + step * torch.arange(length)) % (vocabulary - 1)
    noise = torch.randint(1, vocabulary, (length,), generator=generator)
    return torch.where(torch.rand(length, generator=generator) < 0.1, noise, tokens)


def ragged_length(longest: int, generator: torch.Generator) -> int:
    """A length between a quarter of the longest and the longest, short ones more often, as in real text."""
    share = float(torch.rand((), generator=generator)) ** 2
    return longest // 4 + round(share * (longest - longest // 4))


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collates ragged samples: inputs padded with 0 under an attention mask, labels with -100."""
    inputs = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": pad_sequence(inputs, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in inputs], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def _cast(sample: Any, dtype: torch.dtype) -> Any:
    if isinstance(sample, dict):
        return {key: _cast(value, dtype) for key, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_cast(value, dtype) for value in sample)
    return sample.to(dtype) if isinstance(sample, Tensor) and sample.is_floating_point() else sample
