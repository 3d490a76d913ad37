"""A bottleneck ResNet. BatchNorm mixes the samples of a batch; with GroupNorm the same net keeps them apart."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import draw, stripes
from zoo.family import Family, builder, dataset

CLASSES = 5
EXPANSION = 4


class Shape(NamedTuple):
    side: int
    width: int
    depths: tuple[int, ...]


SHAPES = {"tiny": Shape(16, 4, (1, 1)), "bench": Shape(64, 64, (2, 2, 2, 2)), "large": Shape(224, 64, (3, 4, 6, 3))}
NORMS = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 4)}


class Bottleneck(nn.Module):
    def __init__(self, inward: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        outward = EXPANSION * width
        self.conv1, self.bn1 = nn.Conv2d(inward, width, 1, bias=False), NORMS[norm](width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), NORMS[norm](width)
        self.conv3, self.bn3 = nn.Conv2d(width, outward, 1, bias=False), NORMS[norm](outward)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride != 1 or inward != outward:
            self.downsample = nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), NORMS[norm](outward))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, shape: Shape, dropout: float, norm: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, shape.width, 7, 2, 3, bias=False), NORMS[norm](shape.width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.ModuleList()
        inward = shape.width
        for stage, depth in enumerate(shape.depths):
            for i in range(depth):
                width, stride = shape.width * 2**stage, 2 if stage > 0 and i == 0 else 1
                self.layers.append(Bottleneck(inward, width, stride, norm))
                inward = EXPANSION * width
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(inward, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for block in self.layers:
            x = block(x)
        return self.fc(self.dropout(x.mean(dim=(2, 3))))


def _make(size: str, dropout: float, norm: str) -> nn.Module:
    return ResNet(SHAPES[size], dropout, norm)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, int]:
    label = draw(0, CLASSES, generator)
    return stripes(label, 3, SHAPES[size].side, generator), label


def _loss(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    criterion = nn.CrossEntropyLoss()
    outputs = model(images)
    return criterion(outputs, labels)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


_family = partial(
    Family,
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="classes",
)

FAMILY = _family(name="resnet", build=builder(_make, norm="batch"), mixes=True)
WITH_GROUP_NORM = _family(name="resnet_group", build=builder(_make, norm="group"))
