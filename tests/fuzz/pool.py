"""Seeds run in a process of their own, which may crash or hang without ending the others."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from fuzz.grammar import Choices, drawn
from fuzz.outcomes import CRASHED, Outcome, outcome
from fuzz.script import steps_by_itself

PATIENCE = 120
"""Seconds within which a script has come to an end in all its ways."""
LIFETIME = 400
"""Seeds that one process runs, so that what they leave in it does not add up."""


@dataclass(frozen=True)
class Found:
    """What one seed came to in one mode."""

    seed: int
    mode: str
    kind: str
    what: str
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def found_in(seeds: Iterable[int], *, workers: int = 1) -> Iterator[Found]:
    """Run seeds and yield what they come to, in the order in which they end."""
    waiting = iter(seeds)
    busy: list[_Worker] = []
    for _ in range(workers):
        busy.append(_Worker(waiting))
    while busy := [worker for worker in busy if not worker.is_idle]:
        ready = wait([worker.pipe for worker in busy], max(0.0, min(worker.left for worker in busy)))
        for worker in busy:
            if worker.pipe in ready or worker.left <= 0:
                yield from worker.next()


class _Worker:
    """A process that is given one seed after the other."""

    def __init__(self, seeds: Iterator[int]) -> None:
        self._seeds, self._process, self._done = seeds, None, 0
        self._seed: int | None = None
        self._until = 0.0
        self._begin()

    @property
    def is_idle(self) -> bool:
        """Whether it has no seed in work, as there are no more."""
        return self._seed is None

    @property
    def pipe(self) -> Connection:
        """What its outcomes come through."""
        return self._ours

    @property
    def left(self) -> float:
        """Seconds that its seed may still take."""
        return self._until - time.monotonic()

    def _begin(self) -> None:
        """Send the next seed, to a new process where there is none."""
        self._seed = next(self._seeds, None)
        if self._seed is None:
            self._end()
            return
        if self._process is None or self._done >= LIFETIME:
            self._end()
            context = multiprocessing.get_context("spawn")
            self._ours, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._done = 0
        self._ours.send(self._seed)
        self._until = time.monotonic() + PATIENCE

    def next(self) -> list[Found]:
        """What the seed in work came to; the next one is begun."""
        assert self._seed is not None and self._process is not None
        seed, self._done = self._seed, self._done + 1
        try:
            if not self._ours.poll():
                raise TimeoutError
            found = [Found(seed, *one) for one in self._ours.recv()]
        except TimeoutError:
            found = [Found(seed, "any", CRASHED, "it hangs", f"no end within {PATIENCE} seconds")]
            self._end()
        except EOFError:
            self._process.join()
            found = [Found(seed, "any", CRASHED, "the interpreter ends", f"exit code {self._process.exitcode}")]
            self._end()
        self._begin()
        return found

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._ours.close()
            self._process = None


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["MEMFIT_PROGRESS"] = "off"
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        pipe.send([(mode, one.kind, one.what, one.detail) for mode, one in outcomes_of(drawn(seed))])


def modes_of(choices: Choices) -> tuple[str, ...]:
    """The modes in which a script can be run."""
    return ("script", "step") if steps_by_itself(choices) else ("script",)


def outcomes_of(choices: Choices, modes: Sequence[str] = ()) -> list[tuple[str, Outcome]]:
    """A script's outcomes, by mode (all that it has, or those that are given); an error of the fuzzer's own is one, too."""
    found = []
    for mode in modes or modes_of(choices):
        try:
            found.append((mode, outcome(choices, step=mode == "step")))
        except Exception:
            found.append((mode, Outcome(CRASHED, "the fuzzer itself", traceback.format_exc()[-2000:])))
    return found
