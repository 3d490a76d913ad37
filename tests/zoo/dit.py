"""A diffusion transformer: patches of noisy latents, blocks whose norms are scaled and shifted by the timestep (adaLN-Zero).

Noise and timestep come with the sample, so that a batch has one loss.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import draw, stripes
from zoo.family import Family, builder, dataset

STEPS = 1000


class Shape(NamedTuple):
    side: int
    patch: int
    channels: int
    width: int
    heads: int
    layers: int


SHAPES = {"tiny": Shape(8, 4, 2, 16, 2, 2), "bench": Shape(32, 2, 4, 256, 8, 6)}


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, dropout
        self.norm_1 = nn.LayerNorm(shape.width, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(shape.width, elementwise_affine=False)
        self.qkv, self.project = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(approximate="tanh"), nn.Linear(4 * shape.width, shape.width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 6 * shape.width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate_1 * self.attend(self.norm_1(x) * (1 + scale_1) + shift_1)
        return x + gate_2 * F.dropout(self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2), self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.project(out.transpose(1, 2).reshape(batch, length, width))


class DiT(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.patch, self.width = shape.patch, shape.width
        self.embed = nn.Conv2d(shape.channels, shape.width, shape.patch, stride=shape.patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (shape.side // shape.patch) ** 2, shape.width))
        self.time = nn.Sequential(nn.Linear(shape.width, shape.width), nn.SiLU(), nn.Linear(shape.width, shape.width))
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, elementwise_affine=False)
        self.head = nn.Linear(shape.width, shape.patch**2 * shape.channels)

    def forward(self, noisy: Tensor, timestep: Tensor) -> Tensor:
        x = self.embed(noisy)
        rows, columns = x.shape[2:]
        x = x.flatten(2).transpose(1, 2) + self.position
        condition = self.time(waves(timestep, self.width).to(x.dtype))
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(self.norm(x)).view(len(x), rows, columns, self.patch, self.patch, -1)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(noisy.shape)


def waves(timestep: Tensor, width: int) -> Tensor:
    """The sinusoidal embedding of timesteps."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=timestep.device) / (width // 2))
    angles = timestep.unsqueeze(1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _make(size: str, dropout: float) -> nn.Module:
    return DiT(SHAPES[size], dropout)


def _sample(size: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(noisy latents, timestep, the noise in them)."""
    shape = SHAPES[size]
    clean = stripes(draw(0, 3, generator), shape.channels, shape.side, generator)
    noise, timestep = torch.randn(clean.shape, generator=generator), draw(0, STEPS, generator)
    share = math.cos(0.5 * math.pi * timestep / STEPS)
    return share * clean + math.sqrt(1 - share**2) * noise, torch.tensor(timestep), noise


def _loss(model: nn.Module, batch: Any) -> Tensor:
    noisy, timestep, noise = batch
    return F.mse_loss(model(noisy, timestep), noise)


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    noisy, timestep, noise = batch
    criterion = nn.MSELoss()
    return criterion(model(noisy, timestep), noise)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch[:2])


FAMILY = Family(
    name="dit",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="numbers",
)
