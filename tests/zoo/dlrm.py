"""A click model in the manner of DLRM: bags of embeddings with sparse gradients, their products pair by pair, two small MLPs.

Few optimizers take sparse gradients: SGD, Adagrad and SparseAdam.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import cloud, draw
from zoo.family import Family, builder, dataset


class Shape(NamedTuple):
    tables: int
    rows: int
    bag: int
    width: int
    numbers: int
    hidden: int


SHAPES = {"tiny": Shape(3, 20, 2, 4, 5, 8), "bench": Shape(8, 12_000, 8, 64, 16, 512)}


class Clicks(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(shape.rows, shape.width, mode="sum", sparse=True) for _ in range(shape.tables)
        )
        self.bottom = nn.Sequential(nn.Linear(shape.numbers, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, shape.width))
        vectors = shape.tables + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)
        crossed = shape.width + vectors * (vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(crossed, shape.hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(shape.hidden, shape.hidden), nn.ReLU()
        )
        self.head = nn.Linear(shape.hidden, 1)

    def forward(self, numbers: Tensor, bags: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(bags[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.head(self.top(torch.cat([dense, crossed], dim=1))).squeeze(1)


def _make(size: str, dropout: float) -> nn.Module:
    return Clicks(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers around the centre of their class, bags of rows from its half of each table, and whether it was clicked."""
    shape, clicked = SHAPES[size], draw(0, 2, generator)
    half = shape.rows // 2
    bags = torch.randint(clicked * half, half + clicked * half, (shape.tables, shape.bag), generator=generator)
    return cloud(clicked, shape.numbers, generator), bags, torch.tensor(float(clicked))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    numbers, bags, clicked = batch
    return F.binary_cross_entropy_with_logits(model(numbers, bags), clicked)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    numbers, bags, clicked = batch
    criterion = nn.BCEWithLogitsLoss()
    return criterion(model(numbers, bags), clicked)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch[:2])


FAMILY = Family(
    name="dlrm",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="bits",
)
