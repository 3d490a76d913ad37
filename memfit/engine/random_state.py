"""Captures and restores the random number generators that a forward draws from: torch's, Python's and NumPy's, and those that
a script creates itself and a model holds or is given (`torch.Generator`, `numpy.random.default_rng`, `random.Random`)."""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_OWN: dict[int, Callable[[], Any]] = {}
"""Refers to generators that scripts created, by id; weakly except for NumPy's, which can't be: the latest few of these."""
NUMPYS = 16
"""Number of NumPy's generators that are remembered."""


def remember_generators(values: Iterable[Any]) -> None:
    """Remember the generators among these: passes that run again draw from them what they drew before."""
    for value in values:
        if is_generator(value) and id(value) not in _OWN and not isinstance(value, random.SystemRandom):
            _OWN[id(value)] = _referring_to(value)


def are_generators_known() -> bool:
    """Whether planning has reached a generator that a script created."""
    return bool(_OWN)


def read_generator(generator: Any) -> Any:
    """Return the state of a generator that a script created; None if it has none (`random.SystemRandom`)."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
    elif isinstance(generator, random.Random):
        state = None if isinstance(generator, random.SystemRandom) else generator.getstate()
    elif hasattr(generator, "bit_generator"):
        state = generator.bit_generator.state
    else:
        state = generator.state if hasattr(generator, "state") else generator.get_state(legacy=False)
    return state


def _referring_to(generator: Any) -> Callable[[], Any]:
    key = id(generator)
    try:
        return weakref.ref(generator, lambda gone: _OWN.pop(key, None))
    except TypeError:
        held = [key for key, refer in _OWN.items() if not isinstance(refer, weakref.ref)]
        for key in held[: len(held) + 1 - NUMPYS]:
            del _OWN[key]
        return lambda: generator


def is_generator(value: Any) -> bool:
    """Whether it is a random number generator of torch, Python or NumPy."""
    numpy = sys.modules.get("numpy.random")
    of_numpy = () if numpy is None else (numpy.Generator, numpy.BitGenerator, numpy.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


def write_generator(generator: Any, state: Any) -> None:
    """Set the state that `read_generator` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "state"):
        generator.state = state
    else:
        generator.set_state(state)


def reseed(seed: int, device: torch.device) -> None:
    """Let the generators that `RandomState` restores draw other numbers from now on."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed)
    for generator in [refer() for refer in list(_OWN.values())]:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif hasattr(generator, "seed"):
            generator.seed(seed)
        elif hasattr(generator, "random"):
            generator.random(seed + 1)


@dataclass(frozen=True)
class HostRandom:
    """The state of the generators outside torch's own that a forward may draw from (layer drop with `random.random()`)."""

    python: Any
    """State of Python's `random` module."""
    numpy: Any
    """State of NumPy's global generator; None if NumPy is not imported."""
    own: tuple[tuple[Any, Any], ...] = ()
    """Generators that the script created, with their states."""

    @staticmethod
    def capture() -> HostRandom:
        """Capture the current states."""
        numpy = sys.modules.get("numpy.random")
        there = [generator for refer in list(_OWN.values()) if (generator := refer()) is not None]
        own = tuple((generator, read_generator(generator)) for generator in there)
        return HostRandom(random.getstate(), None if numpy is None else numpy.get_state(legacy=False), own)

    def restore(self) -> None:
        """Restore these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        for generator, state in self.own:
            write_generator(generator, state)

    def is_in_force(self) -> bool:
        """Whether nothing was drawn since."""
        now = HostRandom.capture()
        own = all(_is_same(state, read_generator(generator)) for generator, state in self.own)
        return own and self.python == now.python and pickle.dumps(self.numpy) == pickle.dumps(now.numpy)

    def written(self) -> dict[str, Any]:
        """Return the states as tensors and numbers. Leaves NumPy out if its generator is not the default MT19937."""
        version, words, gauss = self.python
        python = {"version": version, "words": torch.tensor(words), "gauss": gauss}
        if self.numpy is None or self.numpy["bit_generator"] != "MT19937":
            return {"python": python, "numpy": None}
        key, position = (self.numpy["state"][name] for name in ("key", "pos"))
        left = {name: self.numpy[name] for name in ("has_gauss", "gauss")}
        return {"python": python, "numpy": {"key": torch.tensor(key.tolist()), "pos": int(position), **left}}

    @staticmethod
    def read(written: dict[str, Any]) -> HostRandom:
        """Read what `written` returned. Raises a built-in Python exception for anything else."""
        told = written["python"]
        python = (told["version"], tuple(told["words"].tolist()), told["gauss"])
        random.Random().setstate(python)
        told = written["numpy"]
        if told is None:
            return HostRandom(python, None)
        import numpy

        inner = {"key": numpy.array(told["key"].tolist(), dtype=numpy.uint32), "pos": told["pos"]}
        left = {name: told[name] for name in ("has_gauss", "gauss")}
        found = {"bit_generator": "MT19937", "state": inner, **left}
        numpy.random.RandomState().set_state(found)
        return HostRandom(python, found)


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else pickle.dumps(one) == pickle.dumps(other)


@dataclass(frozen=True)
class RandomState:
    """The state of the random number generators that a forward on one device draws from."""

    cpu: torch.Tensor
    """State of the CPU generator."""
    device: torch.Tensor | None
    """State of the accelerator's generator; None on the CPU."""
    host: HostRandom | None
    """States of Python's and NumPy's generators, and of the script's own; None if not captured."""

    @staticmethod
    def capture(device: torch.device, *, host: bool = True) -> RandomState:
        """Capture the current states; without `host` only those of torch, which takes a tenth of the time."""
        outside = HostRandom.capture() if host else None
        if device.type == "cpu":
            return RandomState(torch.default_generator.get_state(), None, outside)
        module = torch.get_device_module(device)
        state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
        return RandomState(torch.get_rng_state(), state, outside)

    @staticmethod
    def begin(device: torch.device, *, host: bool = True) -> RandomState:
        """Capture the current states, for a run that is repeated from them.

        On CUDA the generator is set to the state that it has. cuDNN's recurrent networks draw dropout from a state of their
        own, which torch makes anew from the generator only after that was set (`get_dropout_state` in
        aten/src/ATen/native/cudnn/RNN.cpp). Without it a repeated run would drop other entries than the first."""
        found = RandomState.capture(device, host=host)
        if device.type == "cuda" and found.device is not None:
            torch.cuda.set_rng_state(found.device, device)
        return found

    def restore(self, device: torch.device) -> None:
        """Restore these states."""
        if self.host is not None:
            self.host.restore()
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            module = torch.get_device_module(device)
            module.set_rng_state(self.device) if device.type == "mps" else module.set_rng_state(self.device, device)

    def written(self) -> dict[str, Any]:
        """Return the states as tensors and numbers."""
        host = HostRandom.capture() if self.host is None else self.host
        return {"cpu": self.cpu, "device": self.device, **host.written()}

    @staticmethod
    def read(written: dict[str, Any]) -> RandomState:
        """Read what `written` returned. Raises a built-in Python exception for anything else."""
        torch.Generator().set_state(written["cpu"])
        device = written["device"]
        if device is not None and not (isinstance(device, torch.Tensor) and device.dtype is torch.uint8):
            raise TypeError(f"{type(device).__name__} is not generator state")
        return RandomState(written["cpu"], device, HostRandom.read(written))


LOOKS = 100
"""Number of passes that are checked for draws from generators other than torch's own."""


class HostDraws:
    """Detects whether passes draw from generators other than torch's own. Capturing these takes a hundred times as long.

    Checks the first passes; if none draws, later ones do not capture these states. Repeated passes show draws that start
    later; `missed` is called for the first.
    """

    def __init__(self, missed: Callable[[], None]) -> None:
        self._drew, self._left, self._missed = False, LOOKS, missed

    @property
    def kept(self) -> bool:
        """Whether passes have to capture the states of those generators."""
        return self._drew or self._left > 0

    def ran(self, before: HostRandom | None) -> None:
        """Check a finished pass for draws, given the states before it."""
        if before is not None and not self._drew:
            self._left -= 1
            self._drew = not before.is_in_force()

    @contextmanager
    def repeated(self, device: torch.device, states: Sequence[RandomState]) -> Iterator[None]:
        """Enter `random_state_kept` for a pass that repeats one with these captured states."""
        with random_state_kept(device) as before:
            yield
            unknown = any(state.host is None for state in states)
            if unknown and before.host is not None and not before.host.is_in_force():
                self._drew = True
                self._missed()


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[RandomState]:
    """Restore the random state afterwards. Yields the state before."""
    before = RandomState.capture(device)
    try:
        yield before
    finally:
        before.restore(device)
