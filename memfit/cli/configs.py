"""Builds a training from a transformers configuration file alone: the model on the meta device, and a synthetic batch.

Nothing is downloaded, and no code from the file runs. Not covered: padding (all samples have the length asked for),
configurations of several modalities, models whose code is not part of transformers.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit._errors import UsageError
from memfit._reading import text_of
from memfit._values import check_count
from memfit.levers.precision import PRECISIONS
from memfit.tracing.build_profile import CHECK

TASKS = {
    "seq2seq-lm": ("SEQ_TO_SEQ_CAUSAL_LM", "Seq2SeqLM"),
    "masked-lm": ("MASKED_LM", "MaskedLM"),
    "causal-lm": ("CAUSAL_LM", "CausalLM"),
    "image-classification": ("IMAGE_CLASSIFICATION", "ImageClassification"),
    "sequence-classification": ("SEQUENCE_CLASSIFICATION", "SequenceClassification"),
}
"""The tasks, each with transformers' names of its model table and auto class. If a configuration names no task, the first
one that its model type has is taken."""
OPTIMIZERS = ("adamw", "adamw-fused", "sgd")
"""The first steps parameters in lists (foreach), torch's default on CUDA, which takes one more copy of them."""
LONGEST = 4096
"""Tokens per sample if neither the user nor the model's positions set fewer."""
IMAGE = 224
"""Pixels along each side if the configuration does not say."""
SIZES = (
    *("hidden_size", "d_model", "n_embd", "dim", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "intermediate_size", "d_ff", "vocab_size"),
    *("max_position_embeddings", "n_positions", "image_size", "patch_size", "num_channels"),
)
"""Entries of a configuration that must be positive."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
RELATIVE = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
"""Model types with relative positions: the number in their configuration is no limit."""
AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xlm-roberta-xl", "xmod", "mpnet", "longformer")
"""Model types whose positions start after the padding token's index."""


@dataclass(frozen=True)
class ConfigOptions:
    """Holds the options of a training to build."""

    path: Path
    """A configuration file, or its directory."""
    seq_len: int | None = None
    """Tokens per sample; None: as many as the model has positions, at most `LONGEST`."""
    precision: str | None = None
    """The weights' precision; None: the configuration's."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    task: str | None = None
    """One of `TASKS`; None: the configuration's."""


@dataclass(frozen=True)
class Built:
    """Holds a model of shapes alone, without storage, and what it is trained with."""

    model: Any
    """The module, on the meta device."""
    optimizer: Any
    """Its optimizer."""
    sample: dict[str, torch.Tensor]
    """A batch, keyed by the names of the model's inputs."""
    what: str
    """What a sample is, in words."""


def built(asked: ConfigOptions) -> Built:
    """Build the training that a configuration describes. Raises UsageError."""
    _check(asked)
    file = asked.path / "config.json" if asked.path.is_dir() else asked.path
    data = _read(file)
    _transformers(file)
    with _quietly():
        config = _config(data, asked.precision, file)
        task = asked.task or _task_of(data, config.model_type, file)
        model = _model(config, task, file)
    _check_not_empty(model, file)
    sample, what = _sample(config, model, task, asked.seq_len)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Built(model, _optimizer(asked.optimizer, trained), sample, what)


def _optimizer(name: str, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(trained, lr=0.1)
    found = torch.optim.AdamW(trained)
    for group in found.param_groups:
        group["fused"] = True if name == "adamw-fused" else None  # AdamW(fused=True) refuses the meta device
    return found


def own_loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss that a transformers model computes for a batch with labels."""
    with _quietly():
        return model(**batch).loss


# ---- what was asked


def _check(asked: ConfigOptions) -> None:
    for option, value, known in (
        ("--precision", asked.precision, tuple(PRECISIONS)),
        ("--optimizer", asked.optimizer, OPTIMIZERS),
        ("--task", asked.task, tuple(TASKS)),
    ):
        if value is not None and value not in known:
            raise UsageError(f"{option} {value}", found="memfit does not know it", next_move=f"use one of {', '.join(known)}")
    if asked.seq_len is not None:
        check_count("seq_len", asked.seq_len)


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(text_of(file))
    except OSError as error:
        raise _unusable(file, error.strerror or str(error), "name a config.json, or its directory") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(file, f"it is not JSON ({error})", "re-save it with config.save_pretrained(directory)") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        found = "it is JSON, but names no model_type"
        raise _unusable(file, found, "name a file that config.save_pretrained(directory) wrote")
    for name in SIZES:
        sizes = data.get(name)
        for size in sizes if isinstance(sizes, list) else [sizes]:
            if isinstance(size, (int, float)) and size <= 0:
                raise _unusable(file, f"{name} is {size}", "give it a size of at least 1")
    return data


# ---- what transformers makes of it


def _config(data: dict[str, Any], precision: str | None, file: Path) -> Any:
    CONFIG_MAPPING = _transformers(file).CONFIG_MAPPING

    kind = data["model_type"]
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=5)
        told = f"; the nearest it knows: {', '.join(near)}" if near else ""
        found = f"this transformers has no model_type {kind!r}{told}"
        raise _unusable(file, found, f"correct it, update transformers, or {_BY_FUNCTION}")
    if data.get("quantization_config"):
        raise _unusable(file, "its weights are quantised, which memfit cannot train", "remove quantization_config")
    given = {key: value for key, value in data.items() if key != "auto_map"}
    if precision is not None:
        given = {key: value for key, value in given.items() if key not in ("torch_dtype", "dtype")} | {"torch_dtype": precision}
    try:
        config = CONFIG_MAPPING[kind].from_dict(given)
        parts = (config, _text(config))
    except Exception as error:
        raise _refused(file, error) from error
    for part in parts:
        part.use_cache = False
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    return config


def _text(config: Any) -> Any:
    """The text part of a configuration."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _task_of(data: Mapping[str, Any], kind: str, file: Path) -> str:
    """The task of the architecture in the configuration; without one, or for a model without a head, the first that fits."""
    names = {task: _class_names(task).get(kind) for task in TASKS}
    known = {task: (name,) if isinstance(name, str) else tuple(name or ()) for task, name in names.items()}
    listed = data.get("architectures")
    wanted = str(listed[0]) if isinstance(listed, list) and listed else ""
    found = next((task for task, classes in known.items() if wanted in classes), None)
    bare = not wanted or wanted.endswith("Model")
    likeliest = next((task for task, classes in known.items() if classes), None)
    if found is None and bare and likeliest is not None:
        return likeliest
    if found is None:
        could = ", ".join(task for task, classes in known.items() if classes)
        instead = f"pass --task, one of {could}" if could else _BY_FUNCTION
        what = f"its architecture {wanted} is" if wanted else f"models of type {kind} are"
        raise _unusable(file, f"{what} none that memfit makes a batch for", instead)
    return found


def _model(config: Any, task: str, file: Path) -> Any:
    names = _class_names(task).get(config.model_type)
    if not names:
        could = [other for other in TASKS if config.model_type in _class_names(other)]
        found = f"transformers has no model of type {config.model_type} for {task}"
        raise _unusable(file, found, f"pass --task, one of {', '.join(could)}" if could else _BY_FUNCTION)
    kind = getattr(_transformers(file), f"AutoModelFor{TASKS[task][1]}")
    try:
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=False).train()
    except Exception as error:
        raise _refused(file, error) from error


def _class_names(task: str) -> Mapping[str, Any]:
    """The mapping from model types to the names of their classes for a task."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"MODEL_FOR_{TASKS[task][0]}_MAPPING_NAMES")


def _transformers(file: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        found = f"transformers cannot be imported ({error})"
        raise _unusable(file, found, "pip install transformers") from error
    return transformers


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence transformers' warnings about configurations and losses; nothing trains or generates text here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


# ---- a batch


def _sample(config: Any, model: Any, task: str, seq_len: int | None) -> tuple[dict[str, torch.Tensor], str]:
    if task == "image-classification":
        return _images(config, model, seq_len)
    length = _length(_text(config), seq_len)
    tokens = torch.zeros((), dtype=torch.long).expand(CHECK, length)
    if task == "sequence-classification":
        return {"input_ids": tokens, "labels": _classes(config)}, f"{length:,} tokens per sample"
    decoded = {"decoder_input_ids": tokens} if task == "seq2seq-lm" else {}
    per = f"{length:,} tokens per sample" + (", and as many to generate" if decoded else "")
    return {"input_ids": tokens, **decoded, "labels": tokens}, per


def _images(config: Any, model: Any, seq_len: int | None) -> tuple[dict[str, torch.Tensor], str]:
    if seq_len is not None:
        raise UsageError(f"--seq-len {seq_len}", found="the model takes images", next_move="omit it")
    size = getattr(config, "image_size", None) or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    dtype = next(p.dtype for p in model.parameters())
    pixels = torch.zeros((), dtype=dtype).expand(CHECK, channels, height, width)
    return {"pixel_values": pixels, "labels": _classes(config)}, f"images of {height} x {width} pixels"


def _classes(config: Any) -> torch.Tensor:
    return torch.zeros(CHECK, dtype=torch.float if config.num_labels == 1 else torch.long)


def _length(config: Any, asked: int | None) -> int:
    most = _positions(config)
    if asked is not None and most is not None and asked > most:
        raise UsageError(
            f"--seq-len {asked}",
            found=f"the model has {most:,} positions",
            next_move=f"use at most {most}, or raise max_position_embeddings in the configuration",
        )
    return asked or min(most or LONGEST, LONGEST)


def _positions(config: Any) -> int | None:
    """The most tokens that a sample may have; None if the model sets no limit."""
    if config.model_type in RELATIVE:
        return None
    found = (getattr(config, name, None) for name in POSITIONS)
    most = next((n for n in found if isinstance(n, int) and n > 0), None)
    behind = (config.pad_token_id or 0) + 1 if config.model_type in AFTER_PADDING else 0
    return None if most is None else most - behind


# ---- errors

_BY_FUNCTION = "write a function that returns (model, optimizer, loader, loss_fn) and name it as FILE.py:function"


def _check_not_empty(model: Any, file: Path) -> None:
    empty = next((name for name, p in model.named_parameters() if not p.numel()), None)
    if empty is not None:
        raise _unusable(file, f"{empty} would have no elements", "correct the sizes in it")


def _unusable(file: Path, found: str, next_move: str) -> UsageError:
    return UsageError(f"the configuration {str(file)!r}", found=found, next_move=next_move)


def _refused(file: Path, error: Exception) -> UsageError:
    said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
    return _unusable(file, f"transformers refuses it: {said[:400]}", "correct it, or re-save it with config.save_pretrained")
