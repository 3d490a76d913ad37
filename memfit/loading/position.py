"""Records where a loader stands, to resume it: the epoch, the batches done in it, and what the epoch's order is drawn from.

From this, the order of an interrupted epoch is drawn again, and its first batches are skipped without loading a sample. Not
covered: samplers that keep other random state (a NumPy generator in an attribute); memfit detects that the order differs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit._errors import UsageError
from memfit.engine.random_state import HostRandom
from memfit.loading.draws import Order, draw_seed, generator_of

REMEMBERED = 8
"""Number of first indices that identify the order of an epoch."""


class First:
    """Remembers hashes of the first indices of an epoch's order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def through(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield `items` (indices, or lists of them), and remember the first ones."""
        for item in items:
            self._take(item if isinstance(item, list) else [item])
            yield item
            if len(self.seen) >= REMEMBERED:
                break
        yield from items

    def _take(self, indices: list[Any]) -> None:
        room = REMEMBERED - len(self.seen)
        self.seen += [hashlib.sha256(repr(index).encode()).hexdigest()[:16] for index in indices[:room]]


@dataclass(frozen=True)
class Start:
    """Holds the RNG state that the order of an epoch is drawn from; rank 0's if there are several ranks."""

    seed: int
    """The seed that later epochs derive their draws from."""
    apart: bool
    """Whether this epoch derives its draws from it."""
    state: torch.Tensor
    """The state of torch's global CPU generator when the sampler draws."""
    own: torch.Tensor | None
    """The state of the sampler's generator, or the loader's, if there is one."""
    host: HostRandom
    """The states of Python's and NumPy's generators."""

    @staticmethod
    def now(seed: int, apart: bool, order: Order, generator: torch.Generator | None, *, seeds_workers: bool) -> Start:
        """Capture the current state. `seeds_workers`: torch draws a seed for workers before the order."""
        own = generator_of(order.sampler) or generator
        state = _after_a_seed() if seeds_workers and generator is None else torch.get_rng_state()
        return Start(seed, apart, state, None if own is None else own.get_state(), HostRandom.capture())

    def written(self) -> dict[str, Any]:
        """Return it as tensors, numbers and dictionaries."""
        plain = {"seed": self.seed, "apart": self.apart, "state": self.state, "own": self.own}
        return {**plain, **self.host.written()}

    @staticmethod
    def read(written: dict[str, Any]) -> Start:
        """Restore what `written` returned. Raises a built-in exception for anything else."""
        for name in ("state", "own"):
            if written[name] is not None or name == "state":
                torch.Generator().set_state(written[name])
        seed, apart = _count(written["seed"], least=-math.inf), _flag(written["apart"])
        return Start(seed, apart, written["state"], written["own"], HostRandom.read(written))


@dataclass
class Passage:
    """Tracks an epoch in progress."""

    epoch: int
    start: Start
    index: int = 0
    """Batches yielded so far."""
    ended: bool = False
    first: First = field(default_factory=First)

    def check_order(self, expected: Sequence[str]) -> None:
        """Raise UsageError if the first indices are not those of the interrupted epoch that it resumes (their hashes)."""
        if any(then != now for then, now in zip(expected, self.first.seen)):
            raise UsageError(
                f"resuming at batch {self.index} of epoch {self.epoch}, which was interrupted",
                found="the loader's sampler draws a different order than then",
                next_move="call its set_epoch() as in that epoch, if it has one (run.loader.epoch says which); where it draws "
                "from a generator of its own, load with state['loader']['start'] = None: the epoch then restarts",
            )


@dataclass(frozen=True)
class LoaderPosition:
    """Records where a loader stands."""

    epoch: int
    """The epoch in progress, or the next one."""
    index: int
    """Batches of it that were trained on."""
    size: int | None
    """Samples of an effective batch over all ranks; None if the loader does not say."""
    samples: int | None
    """Samples in an epoch; None if the sampler has no length."""
    parts: int | None
    """Number of ranks that each iterate over their own batches; None if they divide one order."""
    seed: int | None
    """The seed that later epochs derive their draws from."""
    drew: bool
    """Whether later epochs do."""
    own: torch.Tensor | None
    """The state of the sampler's generator, or the loader's, if no epoch is in progress."""
    start: Start | None
    """What the epoch in progress is drawn from; None between epochs."""
    first: tuple[str, ...]
    """Hashes of its first indices, which identify its order."""

    def misplaced(self, size: int | None, samples: int | None, batches: Callable[[], int]) -> tuple[str, str] | None:
        """Return how it differs from a loader of effective batches of `size` samples and epochs of `samples` (None: unknown),
        as (there, here); None if it matches. `batches` counts that loader's batches."""
        if self.size != size:
            return f"effective batches of {_samples(self.size)}", f"of {_samples(size)}"
        if self.samples != samples:
            return f"epochs of {_samples(self.samples)}", f"of {_samples(samples)}"
        if size is not None and samples is not None and (self.index - 1) * size >= samples:
            return f"{self.index} batches of an epoch", f"{batches()}"
        return None

    def written(self) -> dict[str, Any]:
        """Return it as tensors, numbers, texts, lists and dictionaries."""
        start = None if self.start is None else self.start.written()
        return {**vars(self), "start": start, "first": list(self.first)}

    @staticmethod
    def read(written: dict[str, Any]) -> LoaderPosition:
        """Restore what `written` returned. Raises a built-in exception for anything else."""
        if written["own"] is not None:
            torch.Generator().set_state(written["own"])
        sizes = {name: None if written[name] is None else _count(written[name]) for name in ("size", "samples", "parts")}
        return LoaderPosition(
            epoch=_count(written["epoch"]),
            index=_count(written["index"]),
            size=sizes["size"],
            samples=sizes["samples"],
            parts=sizes["parts"],
            seed=None if written["seed"] is None else _count(written["seed"], least=-math.inf),
            drew=_flag(written["drew"]),
            own=written["own"],
            start=None if written["start"] is None else Start.read(written["start"]),
            first=tuple(str(each) for each in written["first"]),
        )


def without_items(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Return `items` without the first `count`."""
    return itertools.islice(items, count, None)


def without_groups(lists: Iterator[Any], size: int, count: int) -> Iterator[Any]:
    """Return lists of indices without the first `count` effective batches, each of as many lists as hold `size` samples."""
    for _ in range(count):
        there = 0
        while there < size and (indices := next(lists, None)) is not None:
            there += len(indices)
    return lists


def without_samples(lists: Iterator[Any], count: int) -> Iterator[Any]:
    """Return lists of indices without the first `count` indices."""
    while count and (indices := next(lists, None)) is not None:
        if len(indices) > count:
            return itertools.chain([indices[count:]], lists)
        count -= len(indices)
    return lists


def _after_a_seed() -> torch.Tensor:
    """The state of torch's global CPU generator after one more seed."""
    twin = torch.Generator()
    twin.set_state(torch.get_rng_state())
    draw_seed(twin)
    return twin.get_state()


def _samples(count: int | None) -> str:
    return "an unknown number of samples" if count is None else f"{count} samples"


def _count(value: Any, least: float = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no count")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither True nor False")
    return value
