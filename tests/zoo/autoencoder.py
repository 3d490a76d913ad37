"""A convolutional autoencoder of black-and-white images: binary cross-entropy against its own input, labels unused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import draw, stripes
from zoo.family import Family, builder, dataset

CLASSES = 5


class Shape(NamedTuple):
    side: int
    widths: tuple[int, ...]
    code: int


SHAPES = {"tiny": Shape(8, (1, 4, 8), 8), "bench": Shape(64, (1, 64, 128, 256, 512), 128)}


class Autoencoder(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        corner = shape.side // 2 ** (len(shape.widths) - 1)
        flat = shape.widths[-1] * corner**2
        self.downs = nn.ModuleList(nn.Conv2d(i, o, 4, 2, 1) for i, o in pairwise(shape.widths))
        self.encode = nn.Linear(flat, shape.code)
        self.dropout = nn.Dropout(dropout)
        self.decode = nn.Linear(shape.code, flat)
        self.unflatten = nn.Unflatten(1, (shape.widths[-1], corner, corner))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(i, o, 4, 2, 1) for i, o in pairwise(reversed(shape.widths)))

    def forward(self, x: Tensor) -> Tensor:
        for down in self.downs:
            x = F.silu(down(x))
        x = self.unflatten(self.decode(self.dropout(self.encode(x.flatten(1)))))
        for up in self.ups:
            x = up(F.silu(x))
        return x


def _make(size: str, dropout: float) -> nn.Module:
    return Autoencoder(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, int]:
    label = draw(0, CLASSES, generator)
    return (stripes(label, 1, SHAPES[size].side, generator) > 0).float(), label


def _loss(model: nn.Module, batch: Any) -> Tensor:
    images, _ = batch
    return F.binary_cross_entropy_with_logits(model(images), images)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    images, _ = batch
    criterion = nn.BCEWithLogitsLoss()
    return criterion(model(images), images)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


FAMILY = Family(
    name="autoencoder",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="bits",
)
