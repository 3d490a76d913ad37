"""The circumstances of a call (autocast, train/eval modes, requires_grad, random state), captured when it is made and
restored when it is run or run again. Not covered: torch function modes and backend flags that a script switches between
call and backward.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Autocast:
    """One device type's autocast state."""

    device_type: str
    """"cpu", "cuda", ..."""
    enabled: bool
    """Whether operations are cast."""
    dtype: torch.dtype
    """To which precision."""
    cache: bool
    """Whether casts of weights are kept for the length of the region."""

    def entered(self) -> torch.autocast:
        """A context in which exactly this state holds."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache)


def autocast_now(device_types: Iterable[str]) -> tuple[Autocast, ...]:
    """The autocast states in force for these device types."""
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
        for kind in dict.fromkeys(device_types)
    )


def autocasting(states: Iterable[Autocast]) -> AbstractContextManager[object]:
    """Exactly these autocast states; nothing is entered where they hold already (each entry clears the weight cache)."""
    differing = [state for state in states if state.enabled or torch.is_autocast_enabled(state.device_type)]
    if not differing:
        return nullcontext()
    stack = ExitStack()
    for state in differing:
        stack.enter_context(state.entered())
    return stack


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off for a device and the host, for inner backward passes."""
    kind = device.type
    if not torch.is_autocast_enabled(kind) and (kind == "cpu" or not torch.is_autocast_enabled("cpu")):
        return nullcontext()
    return autocasting(Autocast(k, False, torch.get_autocast_dtype(k), True) for k in dict.fromkeys((kind, "cpu")))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled models run eagerly; nothing is compiled, and what was compiled stays.

    Compiling while dispatch modes of ours are active would trace into them, give up, and run that code eagerly for good.
    """
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def modes_as(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """The modules' train/eval flags as captured by `modes_of`; those in force come back afterwards."""
    changed = [(module, module.training) for module, training in modes if module.training != training]
    for module, training in modes:
        module.training = training
    try:
        yield
    finally:
        for module, training in changed:
            module.training = training


@contextmanager
def requiring_as(flags: list[tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """The parameters' `requires_grad` as captured by `requires_of`; what is in force comes back afterwards."""
    changed = [(p, wanted) for p, wanted in flags if p.requires_grad != wanted]
    for p, wanted in changed:
        p.requires_grad_(wanted)
    try:
        yield
    finally:
        for p, wanted in changed:
            p.requires_grad_(not wanted)


def requires_of(model: nn.Module) -> list[tuple[torch.Tensor, bool]]:
    """Every parameter's `requires_grad`."""
    return [(p, p.requires_grad) for p in model.parameters()]


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Every module's train/eval flag."""
    return [(module, module.training) for module in model.modules()]


@dataclass(frozen=True)
class HostRandom:
    """The state of the generators outside torch that a forward may draw from (layers dropped by `random.random()`)."""

    python: Any
    """State of the module `random`."""
    numpy: Any
    """State of NumPy's global generator; None where NumPy's was not imported."""

    @staticmethod
    def capture() -> HostRandom:
        """The states now."""
        numpy = sys.modules.get("numpy.random")
        return HostRandom(random.getstate(), None if numpy is None else numpy.get_state())

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


@dataclass(frozen=True)
class RandomState:
    """The state of the random generators a forward on one device draws from."""

    cpu: torch.Tensor
    """The CPU generator's state."""
    device: torch.Tensor | None
    """The accelerator generator's state, or None on the CPU."""
    host: HostRandom
    """The states of Python's and NumPy's generators."""

    @staticmethod
    def capture(device: torch.device) -> RandomState:
        """The states now."""
        if device.type == "cpu":
            return RandomState(torch.get_rng_state(), None, HostRandom.capture())
        module = torch.get_device_module(device)
        state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
        return RandomState(torch.get_rng_state(), state, HostRandom.capture())

    def restore(self, device: torch.device) -> None:
        """Put the states back."""
        self.host.restore()
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            module = torch.get_device_module(device)
            module.set_rng_state(self.device) if device.type == "mps" else module.set_rng_state(self.device, device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """The random state after the block is the one before it."""
    before = RandomState.capture(device)
    try:
        yield
    finally:
        before.restore(device)
