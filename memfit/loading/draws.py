"""The random draws behind a loader: whose they are, and how the loader keeps its own apart from everybody else's.

The first epoch draws from the global generator exactly as the script's own loader would, and so do later ones as long as
nothing else is drawn there while an epoch is under way. After that (dropout on the CPU, a data set's augmentation, whose draws
depend on how batches are cut and divided) they draw from streams derived from a seed remembered from the first, so that their
order does not depend on how many dropout masks were drawn meanwhile. What the script's own loader would have drawn is drawn
from the global generator all the same, and not used: everybody else's draws stay the plain script's. Not covered: samplers that
draw while they are under way rather than before their first index, or from NumPy or `random` (those draws come from the global
generators, as without memfit), and spending what samplers of the script's own would draw: running one twice could change what
it remembers.
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

from memfit.engine.generators import HostRandom
from memfit.loading.parts import Part
from memfit.loading.watch import Watch


def peek_seed(generator: torch.Generator | None) -> int:
    """The seed `generator` (None: the global one) would give next, without taking it."""
    twin = torch.Generator()
    twin.set_state(torch.get_rng_state() if generator is None else generator.get_state())
    return draw_seed(twin)


def draw_seed(generator: torch.Generator) -> int:
    """A seed drawn from `generator`, as torch's own loaders and samplers draw theirs."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def mixed(seed: int, *numbers: int) -> int:
    """A seed of its own for each combination of `seed` and `numbers` (which are not negative)."""
    return int(np.random.SeedSequence([seed % 2**64, *numbers]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def preserved() -> Iterator[None]:
    """The CPU generators of torch, NumPy and `random` are afterwards as they were, whatever the block draws."""
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
    """A private stream (from a seed, or a generator's state) in the place of torch's global CPU generator, and of Python's and
    NumPy's where `host` is given, for as long as a `with` block runs."""

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
    """The script's sampler, whose order is drawn from `stream` instead of the global generator (None: left alone).

    The stream is in place only while the sampler's iterator is created and first advanced: that is when samplers draw. Then
    the global generator gives what the sampler would have taken, unless it did before (`spends`), and `skips` says which items
    are left out. `through` is shown all of them; `watch` is not to take these draws for anybody else's.
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
    """Draw a seed from the global generator, as torch does where none is given, and leave it unused."""
    torch.empty((), dtype=torch.int64, device="cpu").random_()


def _spend(sampler: Any) -> None:
    """Draw from the global generator what the sampler would, if it is one of torch's own."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    inner = inner.sampler if isinstance(inner, Part) else inner
    if type(inner) is RandomSampler:
        if len(inner):
            spend_seed()  # the order itself is drawn from a generator of its own, seeded with this
    elif type(inner) in (SubsetRandomSampler, WeightedRandomSampler):
        next(iter(inner), None)


def keeps_own_order(sampler: Any) -> bool:
    """Whether the sampler, or one it draws from, has its own generator or is told the epoch by the script."""
    for _ in range(8):  # samplers nest through `.sampler`; a handful of levels at most
        if getattr(sampler, "generator", None) is not None or hasattr(sampler, "set_epoch"):
            return True
        sampler = getattr(sampler, "sampler", None)
    return False


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator of the sampler, or of one it draws from, if any has one."""
    for _ in range(8):
        found = getattr(sampler, "generator", None)
        if found is not None or isinstance(sampler, DistributedSampler):
            return found
        sampler = getattr(sampler, "sampler", None)
    return None
