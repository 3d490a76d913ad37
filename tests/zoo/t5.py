"""transformers' T5: encoder and decoder, both ragged; the model makes the decoder's inputs from the labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo import targets
from zoo.data import PAD, counting, draw, pad, ragged_length
from zoo.family import Family, builder, dataset

SHAPES = {
    "tiny": {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "bench": {"vocab_size": 8192, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8},
    "large": {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
}
LONGEST = {"tiny": 12, "bench": 256, "large": 512}


def _make(size: str, dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        **SHAPES[size],
        dropout_rate=dropout,
        pad_token_id=PAD,
        eos_token_id=1,
        decoder_start_token_id=PAD,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def _sample(size: str, generator: torch.Generator) -> dict[str, Tensor]:
    """A text to copy with every second token left out, so that both sides have their own length."""
    length = ragged_length(LONGEST[size], generator)
    text = counting(SHAPES[size]["vocab_size"], length, draw(1, 4, generator), generator)
    return {"input_ids": text, "labels": text[::2]}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    return outputs.loss


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).logits


FAMILY = Family(
    name="t5",
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
