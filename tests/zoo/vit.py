"""transformers' ViT for image classification: dict samples, the model returns its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import draw, stripes
from zoo.family import Family, builder, dataset

CLASSES = 5
SHAPES = {
    "tiny": {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "bench": {
        "image_size": 64,
        "patch_size": 8,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "large": {
        "image_size": 224,
        "patch_size": 16,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}


def _make(size: str, dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        **SHAPES[size],
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        problem_type="single_label_classification",
        attn_implementation="sdpa",
    )
    return ViTForImageClassification(config)


def _sample(size: str, generator: torch.Generator) -> dict[str, Any]:
    label = draw(0, CLASSES, generator)
    return {"pixel_values": stripes(label, 3, SHAPES[size]["image_size"], generator), "labels": label}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(_logits(model, batch), batch["labels"])


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["pixel_values"]).logits


FAMILY = Family(
    name="vit",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.samples,
    task="classes",
    returns_loss=True,
    requires=("transformers",),
)
