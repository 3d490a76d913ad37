"""Real processes over real gloo for tests: a few that stay, and run functions of test modules on every rank."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import random
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

Returned = TypeVar("Returned")

TESTS = str(Path(__file__).parent)
PATIENCE = 120.0
"""Seconds after which processes that have not answered are taken to hang."""


class Hang(AssertionError):
    """Processes did not answer."""


class Failed(AssertionError):
    """A function failed on a rank; the text is that rank's traceback."""


def in_a_new_process(function: Callable[..., Returned], *arguments: Any) -> Returned:
    """What a function that can be imported returns in a process where nothing else has run."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def warm() -> multiprocessing.context.ForkServerContext:
    """Starts processes in which what a training imports and sets up is there already. The server that forks them is not told
    `sys.path` by older Pythons, and passes over modules that it does not find (github.com/python/cpython/issues/117378)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults_warm"])
    there = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TESTS, there)))
    try:
        forkserver.ensure_running()
    finally:
        os.environ["PYTHONPATH"] = there
    return context


class Processes:
    """`size` processes that find each other as those of a launcher do. `run(function, *arguments)` gives what the function
    returned on every rank; it is one that can be imported, and may use memfit as a script started by torchrun would."""

    def __init__(self, size: int, patience: float = PATIENCE) -> None:
        self._patience = patience
        context = warm()
        port = free_port()
        self.size = size
        self._pipes: list[Connection] = []
        self._started = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._started.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What it returned, by rank. Raises Failed or Hang."""
        found = self.outcomes(function, *arguments)
        failed = [f"rank {rank}:\n{value}" for rank, (well, value) in enumerate(found) if not well]
        if failed:
            raise Failed("\n".join(failed))
        return [value for _, value in found]

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """(whether it returned, what it returned or its traceback), by rank. Raises Hang."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(waiting, self._patience)
            if not ready:
                self.end()
                failed = "\n".join(value for well, value in found.values() if not well)
                raise Hang(f"ranks {[rank for rank in range(self.size) if rank not in found]} have not answered\n{failed}")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    found[rank] = (False, "the process ended")
        return [found[rank] for rank in range(self.size)]

    def end(self) -> None:
        """Stop them."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.join()


def environments(size: int, port: int | None = None) -> list[dict[str, str]]:
    """What a launcher tells each of `size` processes on this machine."""
    there = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port()}
    each = [{**there, "RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return [{name: str(value) for name, value in one.items()} for one in each]


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.update(environments(size, port)[rank], OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def free_port() -> int:
    """One that nobody listens on, below those that systems give away by themselves."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("100 ports drawn, all taken")
