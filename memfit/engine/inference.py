"""What modules keep from a forward in inference mode (masks, positions), made fit for training.

Autograd refuses to save inference tensors. A plain script makes a cache for so many samples anew, as its batches have another
size; micro-batches and proofs may have just that one. Not covered: caches outside of modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.engine.modules import modules_of

_SKIPPED = frozenset(vars(nn.Module())) - {"_buffers"}
"""Attributes that every module has: parameters, other modules, hooks."""


def make_savable(model: nn.Module) -> None:
    """Replace inference tensors that attributes of the model's modules hold, in containers too, by ordinary copies."""
    copies: dict[int, torch.Tensor] = {}
    with torch.inference_mode(False):
        for module in modules_of(model):
            for name, value in list(vars(module).items()):
                if name not in _SKIPPED and (made := _savable(value, copies)) is not value:
                    vars(module)[name] = made


def _savable(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The value; lists and dictionaries are changed in place."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference():
            return value
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]
    if isinstance(value, (dict, list)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (made := _savable(item, copies)) is not item:
                value[key] = made
    elif type(value) is tuple:
        made = tuple(_savable(item, copies) for item in value)
        return value if all(a is b for a, b in zip(made, value)) else made
    return value
