"""The state of the random generators that a forward draws from: torch's, Python's and NumPy's.

Not covered: generators that a script makes for itself (`torch.Generator`, `numpy.random.default_rng`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


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
        return HostRandom(random.getstate(), None if numpy is None else numpy.get_state(legacy=False))

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
