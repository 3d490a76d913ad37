"""A net with a layer of every sort that has kernels of its own on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixed(nn.Module):
    """Tokens to classes, through an embedding, an LSTM, attention, normalisations and convolutions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True, dropout=dropout)
        self.norm = nn.LayerNorm(32)
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.batch = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lstm(self.embed(tokens))[0]
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        x = F.relu(self.batch(self.depthwise(self.conv(x[:, None]))))
        return self.head(self.drop(F.gelu(x).mean((2, 3))))


def near(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    """Assert that two tensors are about equal, wherever they are."""
    torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=tolerance, atol=tolerance)
