"""A small GPT written by hand in the manner of nanoGPT: tied weights (or not), and `(logits, loss)` when targets are given."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import counting, draw
from zoo.family import Family, builder, dataset


class Shape(NamedTuple):
    vocabulary: int
    length: int
    width: int
    heads: int
    layers: int


SHAPES = {"tiny": Shape(32, 12, 16, 2, 2), "bench": Shape(8192, 256, 256, 8, 6), "large": Shape(50304, 1024, 768, 12, 12)}


class Attention(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.resid_dropout = nn.Dropout(dropout)
        self.heads, self.dropout = shape.heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        heads = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width)))


class MLP(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape, dropout: float, tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(shape.vocabulary, shape.width),
                "wpe": nn.Embedding(shape.length, shape.width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers)),
                "ln_f": nn.LayerNorm(shape.width),
            }
        )
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        position = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](position))
        for block in self.transformer["h"]:
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _make(size: str, dropout: float, tied: bool) -> nn.Module:
    return GPT(SHAPES[size], dropout, tied)


def sample(size: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A window of text and the same one token later."""
    shape = SHAPES[size]
    text = counting(shape.vocabulary, shape.length + 1, draw(1, 4, generator), generator)
    return text[:-1], text[1:]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)[1]


def script_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    _, loss = model(x, y)
    return loss


def logits(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return model(x, y)[0]


_family = partial(
    Family,
    dataset=dataset(sample),
    loss=loss,
    script_loss=script_loss,
    logits=logits,
    count=targets.tokens,
    task="tokens",
    returns_loss=True,
)

FAMILY = _family(name="gpt", build=builder(_make, tied=True))
UNTIED = _family(name="gpt_untied", build=builder(_make, tied=False))
"""With an embedding and a head of their own."""
