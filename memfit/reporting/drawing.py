"""Finds the modules that draw random numbers in training: dropout in its usual forms, by class name and rate.

Not covered: random numbers that a forward draws itself, without a module (noise, timesteps).
"""

from __future__ import annotations

from typing import Any

_NAMES = ("dropout", "droppath", "drop_path", "stochasticdepth")
_RATES = ("p", "drop_prob", "dropout", "dropout_p", "attn_dropout", "attention_dropout", "attn_pdrop")


def drawing_modules(model: Any) -> tuple[str, ...]:
    """Return the names of dropout-like modules; in a model in training mode, only those in training mode."""
    there = ((name, m) for name, m in model.named_modules() if m.training or not model.training)
    return tuple(name or type(m).__name__ for name, m in there if _drops(m))


def _drops(module: Any) -> bool:
    named = any(word in type(module).__name__.lower() for word in _NAMES)
    rates = _RATES if named else _RATES[2:]  # in other modules, the first two mean other things
    return any(type(rate := getattr(module, name, None)) is float and rate > 0 for name in rates)
