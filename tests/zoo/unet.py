"""A U-Net for segmentation: one label per pixel, some of them ignored, skips that keep early activations alive."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import draw, stripes
from zoo.family import Family, builder, dataset
from zoo.targets import VOID

CLASSES = 4


class Shape(NamedTuple):
    side: int
    width: int
    levels: int


SHAPES = {"tiny": Shape(8, 4, 2), "bench": Shape(64, 32, 4), "large": Shape(256, 64, 4)}


class DoubleConv(nn.Sequential):
    def __init__(self, inward: int, outward: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inward, outward):
            layers += [nn.Conv2d(channels, outward, 3, padding=1), nn.GroupNorm(4, outward), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        widths = [shape.width * 2**level for level in range(shape.levels)]
        self.downs = nn.ModuleList(DoubleConv(i, o) for i, o in zip([3, *widths], widths))
        self.middle = DoubleConv(widths[-1], 2 * widths[-1])
        self.dropout = nn.Dropout2d(dropout)
        self.rises = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths))
        self.ups = nn.ModuleList(DoubleConv(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(shape.width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.dropout(self.middle(x))
        for rise, up in zip(self.rises, self.ups):
            x = up(torch.cat([skips.pop(), rise(x)], dim=1))
        return self.head(x)


def _make(size: str, dropout: float) -> nn.Module:
    return UNet(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A rectangle of one class on a background of class 0; a strip of random height is not labelled."""
    side, label = SHAPES[size].side, draw(1, CLASSES, generator)
    top, left = draw(0, side // 2, generator), draw(0, side // 2, generator)
    mask = torch.zeros(side, side, dtype=torch.long)
    mask[top : top + side // 2, left : left + side // 2] = label
    image = 0.3 * stripes(0, 3, side, generator) + mask
    mask[: draw(0, side // 3, generator)] = VOID
    return image, mask


def _loss(model: nn.Module, batch: Any) -> Tensor:
    image, mask = batch
    return F.cross_entropy(model(image), mask, ignore_index=VOID)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    image, mask = batch
    criterion = nn.CrossEntropyLoss(ignore_index=VOID)
    return criterion(model(image), mask)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


FAMILY = Family(
    name="unet",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.pixels,
    task="pixels",
)
