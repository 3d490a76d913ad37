"""transformers' BERT as a masked language model: ragged lengths, and labels on about one token in six."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import IGNORED, counting, draw, pad, ragged_length
from zoo.family import Family, builder, dataset

SHAPES = {
    "tiny": {
        "vocab_size": 32,
        "max_position_embeddings": 16,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "bench": {
        "vocab_size": 8192,
        "max_position_embeddings": 256,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    },
    "large": {
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}


def _make(size: str, dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        **SHAPES[size],
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return BertForMaskedLM(config)


def _sample(size: str, generator: torch.Generator) -> dict[str, Tensor]:
    shape = SHAPES[size]
    # The highest token is the mask token; text does not contain it.
    mask, length = shape["vocab_size"] - 1, ragged_length(shape["max_position_embeddings"], generator)
    text = counting(mask, length, draw(1, 4, generator), generator)
    hidden = torch.rand(length, generator=generator) < 0.15
    # At least one label per sample: micro-batches without any are a case that tests make on purpose.
    hidden[draw(0, length, generator)] = True
    return {"input_ids": text.masked_fill(hidden, mask), "labels": text.masked_fill(~hidden, IGNORED)}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1), ignore_index=IGNORED)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


FAMILY = Family(
    name="bert",
    build=builder(_make),
    dataset=dataset(_sample),
    collate=pad,
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.tokens,
    task="tokens",
    returns_loss=True,
    ragged=True,
    requires=("transformers",),
)
