"""An odd one: a frozen GPT with low-rank adapters beside its linears, the only parameters that train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import gpt, targets
from zoo.family import Family, builder, dataset

RANKS = {"tiny": 2, "bench": 8}


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        # LoRA starts this at zero; then the gradient of lora_a would be zero as well and no error in it could show.
        self.lora_b = nn.Parameter(0.02 * torch.randn(base.out_features, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(self.dropout(x), self.lora_a), self.lora_b)


def _make(size: str, dropout: float) -> nn.Module:
    model = gpt.GPT(gpt.SHAPES[size], dropout=0.0).requires_grad_(False)
    for block in model.transformer["h"]:
        for parent in (block.attn, block.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child, RANKS[size], dropout))
    return model


FAMILY = Family(
    name="lora",
    build=builder(_make),
    dataset=dataset(gpt.sample),
    loss=gpt.loss,
    script_loss=gpt.script_loss,
    logits=gpt.logits,
    count=targets.tokens,
    task="tokens",
    returns_loss=True,
)
