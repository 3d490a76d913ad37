"""Super-resolution: residual convolutions at low resolution, PixelShuffle up to the high one, mean squared error."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import draw, stripes
from zoo.family import Family, builder, dataset

FACTOR = 2


class Shape(NamedTuple):
    side: int
    width: int
    blocks: int


SHAPES = {"tiny": Shape(6, 8, 2), "bench": Shape(20, 144, 16)}


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.conv2(F.relu(self.conv1(x))))


class SuperResolution(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, shape.width, 3, padding=1)
        self.body = nn.ModuleList(Residual(shape.width, dropout) for _ in range(shape.blocks))
        self.tail = nn.Conv2d(shape.width, 3 * FACTOR**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(FACTOR)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.head(x)
        for block in self.body:
            x = block(x)
        return self.shuffle(self.tail(first + x))


def _make(size: str, dropout: float) -> nn.Module:
    return SuperResolution(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    high = stripes(draw(0, 3, generator), 3, FACTOR * SHAPES[size].side, generator)
    return F.avg_pool2d(high, FACTOR), high


def _loss(model: nn.Module, batch: Any) -> Tensor:
    low, high = batch
    return F.mse_loss(model(low), high)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    low, high = batch
    criterion = nn.MSELoss()
    return criterion(model(low), high)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


FAMILY = Family(
    name="superres",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="numbers",
)
