"""transformers' ConvNeXt for image classification; `dropout` drops whole residual branches."""

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
    "tiny": {"image_size": 8, "patch_size": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2},
    "bench": {"image_size": 64, "patch_size": 4, "depths": [2, 2, 6, 2], "hidden_sizes": [56, 112, 224, 448]},
    "large": {"image_size": 224, "patch_size": 4, "depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768]},
}


def _make(size: str, dropout: float) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        **SHAPES[size],
        num_labels=CLASSES,
        drop_path_rate=dropout,
        # At the usual 1e-6 the blocks hardly contribute, and errors in their gradients would not show.
        layer_scale_init_value=0.1,
        problem_type="single_label_classification",
    )
    return ConvNextForImageClassification(config)


def _sample(size: str, generator: torch.Generator) -> dict[str, Any]:
    label = draw(0, CLASSES, generator)
    return {"pixel_values": stripes(label, 3, SHAPES[size]["image_size"], generator), "labels": label}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return model(pixel_values=batch["pixel_values"], labels=batch["labels"]).loss


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["pixel_values"])["logits"]
    return F.cross_entropy(logits, batch["labels"])


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["pixel_values"]).logits


FAMILY = Family(
    name="convnext",
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
