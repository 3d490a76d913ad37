"""A byte-level GPT in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
"""Vocabulary size."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a `ByteGPT`."""

    length: int = 128
    """Sequence length in bytes."""
    width: int = 256
    """Embedding dimension."""
    heads: int = 4
    """Attention heads per block."""
    blocks: int = 10
    """Number of transformer blocks."""


class ByteGPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        blocks = [TransformerBlock(shape) for _ in range(shape.blocks)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.apply(_initialise)
        for block in blocks:
            block.quieten(2 * shape.blocks)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        x = self.bytes(text) + self.places(torch.arange(text.size(1), device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: causal self-attention, then an MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.joined = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.wide, self.narrow = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to the features `x`."""
        x = x + self._attended(self.before(x))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))

    def quieten(self, additions: int) -> None:
        """Scale the residual projections by 1/sqrt(`additions`), so that at first all residual additions count as one."""
        with torch.no_grad():
            for layer in (self.joined, self.narrow):
                layer.weight.mul_(additions**-0.5)

    def _attended(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return self.joined(y.transpose(1, 2).reshape(batch, length, width))


def next_byte_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
