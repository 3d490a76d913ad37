"""An odd one: a frozen encoder, a parameter that no forward uses, and one weight under two names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import cloud, draw
from zoo.family import Family, builder, dataset

CLASSES = 5


class Shape(NamedTuple):
    inputs: int
    width: int
    layers: int


SHAPES = {"tiny": Shape(12, 16, 2), "bench": Shape(1024, 1024, 8)}


class Block(nn.Module):
    """Both linears work with one weight."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.outer.weight = self.inner.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(F.gelu(self.inner(self.norm(x)))))


class PartlyFrozen(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(shape.inputs, shape.width), nn.GELU(), nn.LayerNorm(shape.width))
        self.encoder.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(shape.width, dropout) for _ in range(shape.layers))
        self.unused = nn.Linear(shape.width, 2)
        self.head = nn.Linear(shape.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _make(size: str, dropout: float) -> nn.Module:
    return PartlyFrozen(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, int]:
    label = draw(0, CLASSES, generator)
    return cloud(label, SHAPES[size].inputs, generator), label


def _loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


FAMILY = Family(
    name="frozen",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="classes",
)
