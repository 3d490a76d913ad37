"""A plain multi-layer perceptron: the smallest training script there is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import cloud, draw
from zoo.family import Family, builder, dataset

CLASSES = 5
WIDTHS = {"tiny": (12, 24, 24), "bench": (3072, 2048, 2048, 2048)}


def _make(size: str, dropout: float) -> nn.Module:
    layers: list[nn.Module] = []
    for inward, outward in pairwise(WIDTHS[size]):
        layers += [nn.Linear(inward, outward), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(WIDTHS[size][-1], CLASSES))


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, int]:
    label = draw(0, CLASSES, generator)
    return cloud(label, WIDTHS[size][0], generator), label


def _loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.CrossEntropyLoss()(model(x), y)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


FAMILY = Family(
    name="mlp",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="classes",
)
