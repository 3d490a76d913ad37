"""Converts tensors that modules cache in inference mode (masks, positions) to ordinary tensors for training.

Autograd refuses to save inference tensors. A plain script rebuilds such a cache because its training batches have another
size, but micro-batches and proofs may have the same size. Not covered: caches outside modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.engine.modules import modules_of

_SKIPPED = frozenset(vars(nn.Module())) - {"_buffers"}
"""Attributes of every module: parameters, submodules, hooks."""


class Caches:
    """The cached tensors of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._from_inference = model, False

    def evaluated(self) -> None:
        """Note the end of a forward without gradients."""
        self._from_inference = self._from_inference or torch.is_inference_mode_enabled()

    def trains(self) -> None:
        """Convert caches before a training forward (not after each evaluation: generation makes a key cache per token)."""
        if self._from_inference:
            self._from_inference = False
            _make_savable(self._model)


def _make_savable(model: nn.Module) -> None:
    """Convert the inference tensors in the attributes of the model's modules, and in containers there."""
    made = Ordinary()
    with torch.inference_mode(False):
        for module in modules_of(model):
            for name, value in list(vars(module).items()):
                if name not in _SKIPPED and (new := made.of(value)) is not value:
                    vars(module)[name] = new


class Ordinary:
    """Maps inference tensors to ordinary ones, each to one tensor."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """Return the converted value. Lists and dictionaries are changed in place."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (dict, list)):
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (made := self.of(item)) is not item:
                    value[key] = made
        elif type(value) is tuple:
            made = tuple(map(self.of, value))
            return value if all(a is b for a, b in zip(made, value)) else made
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_inference():
            tensor.data = tensor.clone()
            self._made[id(tensor)] = tensor, tensor if _counts_versions(tensor) else tensor.clone()
        return self._made.get(id(tensor), (tensor, tensor))[1]


def _counts_versions(tensor: torch.Tensor) -> bool:
    """Whether it was created outside inference mode and got its data inside."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False
