"""Runs code in the middle of other code whose modes must not see it: requests of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from memfit.engine.known_means import unseen


@contextmanager
def aside() -> Iterator[None]:
    """Deactivate all torch function and dispatch modes, and the interception of losses."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with _disable_current_modes(), unseen():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
