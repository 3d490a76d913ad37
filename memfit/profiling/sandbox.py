"""Leave no trace: what planning touches is put back bit for bit, also when it fails or is interrupted.

Covered: random state of every device in use, of Python and of NumPy, buffers, gradients, train/eval modes, autocast, attributes
that a forward writes on modules (one level of lists, dicts and sets inside them too), data that it gives a parameter.
Parameters and optimizer state are never written by planning. What hooks leave behind is in `hooks.py`. Not covered:
parameters that a forward writes in place, and other state that it keeps outside its modules.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memfit.engine.context import autocast_kept, modes_as, modes_of, restore_tensors
from memfit.engine.generators import random_state_kept
from memfit.engine.modules import modules_of
from memfit.engine.staged import let_go
from memfit.profiling.hooks import hooks_kept, put_back, refilled


@contextmanager
def leave_no_trace(
    model: nn.Module, device: torch.device, *, buffers: bool = True, outside: Sequence[torch.Tensor] = ()
) -> Iterator[None]:
    """Everything listed above is afterwards as it was. `buffers=False` where fake ones stand in their places meanwhile;
    `outside` are parameters that live in no module of the model."""
    let_go(model)
    held = [(p, p.detach(), p.grad) for p in (*model.parameters(), *outside)]
    with (
        autocast_kept((device.type, "cpu", "cuda")),
        random_state_kept(device),
        hooks_kept(model),
        attributes_kept(model),
        modes_as(modes_of(modules_of(model))),
    ):
        copies = [(b, b.detach().clone()) for b in model.buffers()] if buffers else []
        try:
            yield
        finally:
            let_go(model)
            restore_tensors(copies)
            for p, data, gradient in held:
                if p.untyped_storage()._cdata != data.untyped_storage()._cdata:
                    p.data = data
                p.grad = gradient


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """No garbage collection at chance moments: two traces of the same step free in the same order."""
    gc.collect(1)  # all of it takes a fifth of a second where transformers is loaded
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Attributes of all modules are afterwards the objects they were, simple containers with the same contents."""
    before = [(module, dict(module.__dict__), _contents(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            put_back(module.__dict__, attributes)
            for container, items in contents:
                refilled(container, items)


def _contents(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in attributes.values() if isinstance(value, (list, dict, set))]
