"""Activation checkpointing: frees a block's activations after its forward and recomputes them in backward.

Blocks keep their names, types and state_dict keys: only the instance's `forward` is replaced. Uses torch's non-reentrant
checkpoint, which preserves the RNG state. Recomputation runs on the state that the first forward began with, and restores the
current one. Inside the script's own checkpoint blocks run as they are: its recomputation repeats what their forwards write.
Not covered: recomputing part of a block. Blocks called more than once per forward are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit._errors import UsageError
from memfit.engine.call_context import in_checkpoint
from memfit.engine.intercept import Interception
from memfit.engine.random_state import RandomState
from memfit.levers.arguments import as_it_was
from memfit.levers.recomputed import Moving, RecomputeContext, moving_of


def candidate_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks: entries with parameters in the outermost ModuleLists and Sequentials."""
    found: list[str] = []
    _descend(model, "", found)
    return tuple(found)


def checkpoint_blocks(
    model: nn.Module,
    names: Iterable[str],
    owner: Any = None,
    between: Callable[[], None] = lambda: None,
    uninterrupted: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Checkpoint the named blocks from now on, and return a function that undoes it. `between` is called before each forward
    and each recomputation of a block. `uninterrupted` says whether nobody can write parameters before the block's backward.
    Raises UsageError for unknown names."""
    names = tuple(names)
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules or not name]
    if unknown:
        raise UsageError(
            f"checkpoint={names!r}",
            found=f"the model has no block called {unknown[0]!r}",
            next_move=f"use names such as {', '.join(candidate_blocks(model)[:3]) or 'those of its submodules'}",
        )
    moving = moving_of([modules[name] for name in names])
    answers = {name: _Checkpointed(modules[name], moving, between, uninterrupted) for name in names}
    installed = [Interception(modules[name], answer, owner) for name, answer in answers.items()]
    for interception in installed:
        interception.install()

    def undo() -> None:
        for interception in reversed(installed):
            interception.remove()

    return undo


@contextmanager
def checkpointed(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Checkpoint the named blocks inside the context."""
    undo = checkpoint_blocks(model, tuple(names))
    try:
        yield
    finally:
        undo()


class _Checkpointed:
    """Replaces a block's forward with a checkpointed one while grad mode is enabled."""

    def __init__(
        self, block: nn.Module, moving: Moving, between: Callable[[], None], uninterrupted: Callable[[], bool]
    ) -> None:
        self._block, self._moving, self._between, self._uninterrupted = block, moving, between, uninterrupted
        drops = any(isinstance(module, nn.RNNBase) and module.dropout for module in block.modules())
        self._draws_on = next((p.device for p in block.parameters() if p.is_cuda), None) if drops else None

    def __call__(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or (in_checkpoint() and not self._moving.in_block):
            return plain(*args, **kwargs)
        self._between()
        if self._draws_on is not None:
            RandomState.begin(self._draws_on, host=False)
        run = _Repeatable(self._moving.within(plain), args, kwargs)
        again = RecomputeContext(self._moving.begun(self._block), self._between)
        output = checkpoint(run, *args, use_reentrant=False, context_fn=partial(_contexts, again), **kwargs)
        if not self._uninterrupted():
            again.ran(self._block)
        return output


def _contexts(again: RecomputeContext) -> tuple[Any, Any]:
    return nullcontext(), again


class _Repeatable:
    """A block's forward that restores its arguments when it is recomputed. Arguments other than tensors may be mutated: a KV
    cache, which `transformers` passes from block to block, grows with every run."""

    def __init__(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._plain, self._ran = plain, False
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        kept = {name: as_it_was(value) for name, value in given.items()}
        self._kept = {name: value for name, value in kept.items() if value is not given[name]}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self._ran = self._ran, True
        if again and self._kept:
            kept = {name: as_it_was(value) for name, value in self._kept.items()}  # it may run more than twice
            args = tuple(kept.get(index, value) for index, value in enumerate(args))
            kwargs = {name: kept.get(name, value) for name, value in kwargs.items()}
        return self._plain(*args, **kwargs)


def _descend(module: nn.Module, prefix: str, found: list[str]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            entries = [(f"{path}.{key}", entry) for key, entry in child.named_children()]
            if any(list(entry.children()) for _, entry in entries):
                for key, entry in entries:
                    _add(key, entry, found)
                continue
        _descend(child, f"{path}.", found)


def _add(name: str, entry: nn.Module, found: list[str]) -> None:
    if isinstance(entry, (nn.ModuleList, nn.Sequential)) and len(entry) > 1 and any(list(e.children()) for e in entry):
        for key, part in entry.named_children():
            _add(f"{name}.{key}", part, found)
    elif any(p is not None for p in entry.parameters()):
        found.append(name)
