"""Separates the loader's own random draws from all others.

The first epoch draws from the global generator exactly as the script's own loader does. Later epochs do the same, as long as
nothing else draws from it during an epoch. After such a draw (dropout on the CPU, a dataset's augmentation; how many there are
depends on how batches are cut and divided), epochs draw from streams derived from a seed of the first epoch. So their order
does not depend on the number of dropout masks. The draws of the script's own loader are still taken from the global generator
and discarded: all other draws stay those of the plain script. Not covered: samplers that draw later than before their first
index, or from NumPy or `random` (those draws come from the global generators, as without memfit), and discarding what samplers
of the script's own classes would draw: running one twice could change its state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from memfit.engine.random_state import HostRandom
from memfit.loading.parts import RankSampler
from memfit.loading.watch import Watch


def peek_seed(generator: torch.Generator | None) -> int:
    """Return the seed that `generator` (None: the global one) would give next, without drawing it."""
    twin = torch.Generator()
    twin.set_state(torch.get_rng_state() if generator is None else generator.get_state())
    return draw_seed(twin)


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed from `generator`, as torch's own loaders and samplers do."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def mixed(seed: int, *numbers: int) -> int:
    """Derive a separate seed for each combination of `seed` and `numbers` (not negative)."""
    return int(np.random.SeedSequence([seed % 2**64, *numbers]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the CPU generators of torch, NumPy and `random` after the block, whatever it draws."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Like `preserved`, with all three generators seeded inside the block."""
    with preserved():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices too
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


class Stream:
    """Replaces torch's global CPU generator inside a `with` block by a private stream, from a seed or a generator's state.
    With `host`, it replaces Python's and NumPy's generators too."""

    def __init__(self, seed: int = 0, *, state: torch.Tensor | None = None, host: HostRandom | None = None) -> None:
        self._inside = torch.Generator().manual_seed(seed).get_state() if state is None else state
        self._outside = self._inside
        self._host, self._host_outside = host, host

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self._inside)
        if self._host is not None:
            self._host_outside = HostRandom.capture()
            self._host.restore()

    def __exit__(self, *_: object) -> None:
        self._inside = torch.get_rng_state()
        torch.set_rng_state(self._outside)
        if self._host_outside is not None:
            self._host = HostRandom.capture()
            self._host_outside.restore()


class Order:
    """Wraps the script's sampler so that it draws its order from `stream` instead of the global generator (None: unchanged).

    The stream is in place only while the sampler's iterator is created and first advanced: that is when samplers draw. With
    `spends`, what the sampler would have drawn from the global generator is drawn from it and discarded. `skips` leaves items
    out; `through` sees all of them. `watch` does not count these draws as others'.
    """

    def __init__(self, sampler: Iterable[Any], watch: Watch) -> None:
        self.sampler = sampler
        self.stream: Stream | None = None
        self.spends = True
        self.skips: Callable[[Iterator[Any]], Iterator[Any]] | None = None
        self.through: Callable[[Iterator[Any]], Iterator[Any]] = iter
        self._watch = watch

    def __iter__(self) -> Iterator[Any]:
        stream = self.stream or nullcontext()
        with stream:
            indices = iter(self.sampler)
        self._watch.mark()
        spends = self.stream is not None and self.spends
        return self._advanced(self.through(indices), stream, spends, self.skips or iter)

    def _advanced(
        self,
        indices: Iterator[Any],
        stream: AbstractContextManager[None],
        spends: bool,
        skips: Callable[[Iterator[Any]], Iterator[Any]],
    ) -> Iterator[Any]:
        if spends:
            _spend(self.sampler)
        try:
            with stream:
                left = skips(indices)
                first = next(left)
        except StopIteration:
            return
        finally:
            self._watch.mark()
        yield first
        yield from left

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "sampler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.sampler, name)


def spend_seed() -> None:
    """Draw a seed from the global generator, as torch does without a given one, and discard it."""
    torch.empty((), dtype=torch.int64, device="cpu").random_()


def _spend(sampler: Any) -> None:
    """Draw from the global generator what the sampler would, if its class is one of torch's."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    inner = inner.sampler if isinstance(inner, RankSampler) else inner
    if type(inner) is RandomSampler:
        if len(inner):
            spend_seed()  # the order comes from a separate generator, seeded with this
    elif type(inner) in (SubsetRandomSampler, WeightedRandomSampler):
        next(iter(inner), None)


def keeps_own_order(sampler: Any) -> bool:
    """Return whether the sampler, or one it draws from, has its own generator or a `set_epoch` for the script to call."""
    for _ in range(8):  # samplers nest through `.sampler`; a handful of levels at most
        if getattr(sampler, "generator", None) is not None or hasattr(sampler, "set_epoch"):
            return True
        sampler = getattr(sampler, "sampler", None)
    return False


def generator_of(sampler: Any) -> torch.Generator | None:
    """Return the generator of the sampler, or of one it draws from; None if none has one."""
    for _ in range(8):
        found = getattr(sampler, "generator", None)
        if found is not None or isinstance(sampler, DistributedSampler):
            return found
        sampler = getattr(sampler, "sampler", None)
    return None
