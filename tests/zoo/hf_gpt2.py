"""transformers' GPT-2: labels go in, the model shifts them itself and returns its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import targets
from zoo.data import IGNORED, counting, draw
from zoo.family import Family, builder, dataset

SHAPES = {
    "tiny": {"vocab_size": 32, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "bench": {"vocab_size": 8192, "n_positions": 256, "n_embd": 256, "n_layer": 6, "n_head": 8},
}


def _make(size: str, dropout: float) -> nn.Module:
    # Inside the function, as in all such families: the import takes seconds and hand-written models do not need it.
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **SHAPES[size],
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=1,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config)
    model.loss_function = _causal_loss
    return model


def _causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """ForCausalLMLoss of transformers, except that float64 is not rounded to float32: exact laws need it."""
    from transformers.loss.loss_utils import fixed_cross_entropy

    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return fixed_cross_entropy(logits.view(-1, vocab_size), shifted.view(-1), **kwargs)


def _sample(size: str, generator: torch.Generator) -> dict[str, Tensor]:
    shape = SHAPES[size]
    text = counting(shape["vocab_size"], shape["n_positions"], draw(1, 4, generator), generator)
    return {"input_ids": text, "labels": text}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def _script_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch["input_ids"], labels=batch["labels"])
    return outputs[0]


def _logits(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["input_ids"]).logits


FAMILY = Family(
    name="hf_gpt2",
    build=builder(_make),
    dataset=dataset(_sample),
    loss=_loss,
    script_loss=_script_loss,
    logits=_logits,
    count=targets.next_tokens,
    task="next_tokens",
    returns_loss=True,
    requires=("transformers",),
)
