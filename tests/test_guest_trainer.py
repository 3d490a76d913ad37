"""transformers' Trainer with a wrapped model: its losses, its parameters, its checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memfit

pytest.importorskip("transformers")

WORDS = 97
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "its own accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=WORDS, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config).double()


def texts(count: int = 20) -> list[dict[str, Tensor]]:
    """Samples of 8 to 24 tokens, every third with labels that do not count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        length = int(torch.randint(8, 25, (1,), generator=generator))
        tokens = torch.randint(0, WORDS, (length,), generator=generator)
        labels = tokens.clone()
        labels[: 0 if index % 3 else 5] = -100
        found.append({"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)})
    return found


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = torch.nn.utils.rnn.pad_sequence
    return {name: rows([s[name] for s in samples], batch_first=True, padding_value=fill[name]) for name in fill}


def trained(folder: Path, settings: dict[str, Any], micro_batch: Any) -> tuple[list[float], Any, Any]:
    """(losses of training and evaluation, the model, memfit's run if any)."""
    from transformers import Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    model = copy.deepcopy(language_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    run = None if micro_batch is None else memfit.wrap(model, optimizer, micro_batch=micro_batch)
    fixed: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_train_epochs": 1, "report_to": [], "logging_steps": 1,
        "use_cpu": True, "disable_tqdm": True, "seed": 3, "save_strategy": "epoch", "eval_strategy": "epoch",
        "max_grad_norm": 1.0,
    }  # fmt: skip
    trainer = Trainer(
        model=model, args=TrainingArguments(**(fixed | settings)), train_dataset=texts(), eval_dataset=texts(6),
        data_collator=padded, optimizers=(optimizer, scheduler),
    )  # fmt: skip
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry], model, run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_trainer_trains_a_wrapped_model_as_it_trains_a_plain_one(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT", "strict")
    losses, plain, _ = trained(tmp_path / "plain", settings, None)
    found, model, run = trained(tmp_path / "cut", settings, 3)
    assert run.plan.accumulation > 1
    assert losses and found == pytest.approx(losses, rel=1e-5)  # (the trainer's own are float32)
    wanted = torch.cat([p.detach().flatten() for p in plain.parameters()])
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((parameters - wanted).norm() / wanted.norm()) <= 1e-12
    saved = next((tmp_path / "cut").glob("checkpoint-*"))
    assert type(model).from_pretrained(saved).state_dict().keys() == plain.state_dict().keys()
