"""A text classifier on nn.LSTM: its flattened weights and fused kernels are what makes recurrent nets special."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import counting, draw
from zoo.family import Family, builder, dataset

CLASSES = 5


class Shape(NamedTuple):
    vocabulary: int
    length: int
    embedding: int
    hidden: int


SHAPES = {"tiny": Shape(32, 8, 8, 12), "bench": Shape(8192, 128, 256, 512), "large": Shape(32000, 512, 512, 1024)}


class Classifier(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.embedding)
        self.lstm = nn.LSTM(shape.embedding, shape.hidden, num_layers=2, batch_first=True, dropout=dropout)
        self.fc = nn.Linear(shape.hidden, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.fc(hidden[-1])


def _make(size: str, dropout: float) -> nn.Module:
    return Classifier(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, int]:
    """The class is the step by which the text counts."""
    label = draw(0, CLASSES, generator)
    return counting(SHAPES[size].vocabulary, SHAPES[size].length, label + 1, generator), label


def _loss(model: nn.Module, batch: Any) -> Tensor:
    text, label = batch
    return F.cross_entropy(model(text), label)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    text, label = batch
    return F.nll_loss(F.log_softmax(model(text), dim=1), label)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


FAMILY = Family(
    name="lstm",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="classes",
)
