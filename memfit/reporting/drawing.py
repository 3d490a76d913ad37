"""Which modules of a model draw random numbers while it trains: dropout in its usual shapes, found by name and rate.

Not covered: draws of a forward's own (noise, timesteps), which no module stands for.
"""

from __future__ import annotations

from typing import Any

_NAMES = ("dropout", "droppath", "drop_path", "stochasticdepth")
_RATES = ("p", "drop_prob", "dropout", "dropout_p", "attn_dropout", "attention_dropout", "attn_pdrop")


def drawing_modules(model: Any) -> tuple[str, ...]:
    """The names of modules that drop something at random, while they train."""
    there = ((name, m) for name, m in model.named_modules() if m.training or not model.training)
    return tuple(name or type(m).__name__ for name, m in there if _drops(m))


def _drops(module: Any) -> bool:
    named = any(word in type(module).__name__.lower() for word in _NAMES)
    rates = _RATES if named else _RATES[2:]  # the first two mean other things elsewhere
    return any(type(rate := getattr(module, name, None)) is float and rate > 0 for name in rates)
