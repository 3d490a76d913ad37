"""A language model whose feed-forward parts are mixtures of experts: each token goes to two of them, by computed indices.

How many tokens an expert gets is decided by the data, as in `transformers`' Mixtral: shapes cannot be traced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import gpt, targets
from zoo.data import counting, draw
from zoo.family import Family, builder, dataset

CHOSEN = 2


class Shape(NamedTuple):
    vocabulary: int
    length: int
    width: int
    heads: int
    layers: int
    experts: int


SHAPES = {"tiny": Shape(32, 12, 16, 2, 2, 4), "bench": Shape(4096, 128, 256, 8, 4, 8)}


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(x)))


class Mixture(nn.Module):
    """Every token is the weighted sum of what its experts make of it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).softmax(dim=-1).topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            found = expert(tokens[rows]) * weights[rows, place].unsqueeze(-1)
            out.index_add_(0, rows, found.to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attn = gpt.Attention(gpt.Shape(*shape[:5]), dropout)
        self.mixture, self.dropout = Mixture(shape.width, shape.experts), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.mixture(self.ln_2(x)))


class MixtureOfExperts(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _make(size: str, dropout: float) -> nn.Module:
    return MixtureOfExperts(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = SHAPES[size]
    text = counting(shape.vocabulary, shape.length + 1, draw(1, 4, generator), generator)
    return text[:-1], text[1:]


def _loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


FAMILY = Family(
    name="moe",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.tokens,
    task="tokens",
)
