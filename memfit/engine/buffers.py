"""Buffers that a training forward writes (batch statistics, codebooks): written by the first pass only, restored on retry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memfit.engine.call_context import restore_tensors

Copies = list[tuple[torch.Tensor, torch.Tensor]]


def beside_statistics(model: nn.Module, written: Iterable[str]) -> bool:
    """Return whether any of these buffers is not a batch norm statistic. (No autograd graph saves those.)"""
    modules = dict(model.named_modules())
    owners = (modules.get(name.rpartition(".")[0]) for name in written)
    return any(not isinstance(owner, nn.modules.batchnorm._NormBase) for owner in owners)


class WrittenBuffers:
    """Tracks which buffers of a model training writes. Until `declare` is called, all of them count as written."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: frozenset[str] | None = None

    def declare(self, names: Iterable[str]) -> None:
        """Record the buffers that tracing found to be written."""
        self._written = frozenset(names)

    @property
    def written(self) -> bool:
        """Whether any buffer may be written."""
        names = (name for name, _ in self._model.named_buffers())
        return any(self._written is None or name in self._written for name in names)

    def watched(self) -> Callable[[], bool]:
        """Return a function that restores batch norm statistics and tells whether all other buffers are unchanged since this
        call. The others are not copied: a memory bank may be as large as the model."""
        norms = [module for module in self._model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        copies = [(b, b.detach().clone()) for norm in norms for b in norm.buffers(recurse=False)]
        copied = {id(b) for b, _ in copies}

        def looks() -> list[tuple[int, int]]:
            others = (b for b in self._model.buffers() if id(b) not in copied)
            return [(id(b), 0 if b.is_inference() else b._version) for b in others]

        before = looks()

        def put_back() -> bool:
            restore_tensors(copies)
            return looks() == before

        return put_back

    def snapshot(self) -> Copies:
        """Return copies of the buffers that may be written."""
        if self._written is not None and not self._written:
            return []
        named = self._model.named_buffers()
        return [(b, b.detach().clone()) for name, b in named if self._written is None or name in self._written]

    @contextmanager
    def kept(self, wanted: bool) -> Iterator[None]:
        """Context manager that restores the buffers on exit if `wanted`."""
        copies = self.snapshot() if wanted else []
        try:
            yield
        finally:
            restore_tensors(copies)
