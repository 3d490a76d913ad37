"""The ranks of one training, seen from one of them: messages between them, and sums over all.

Messages go over a gloo group of their own, apart from gradients, so that a failed rank can still tell the others, whatever
its device is doing. Every exchange says where its sender is and whether it failed or ended, so that nobody waits for a rank
that gave up or is elsewhere in its script. A rank may request something that needs all ranks (a full state dict, on rank 0
only). The others help at their next exchange, whatever that is about. Not covered: a rank that hangs without failing; the
process group's timeout ends that.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memfit._errors import MemfitError, RankFailed
from memfit.hardware.exhausted import retry_on_oom
from memfit.ranks.exchange import Exchange, Told
from memfit.ranks.launched import Launched
from memfit.ranks.passes import PASSES, Passes

FAREWELL = timedelta(seconds=30)
"""How long a failed rank waits for the others to learn of it before it raises its own error."""
BEHIND = 1.0
"""Seconds that a rank waits after it learns of another's error. That rank's traceback then comes first, and launchers
take it for the cause."""
NOTHING, FAILED, ENDED = 0, -1, -2
"""What a rank wants from the others beside their exchange. Positive values are services and passes."""
Service = Callable[[Sequence[int]], None]
"""What all ranks do for the ranks that ask for it."""
GONE = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport")
"""Words in gloo's errors if the process at the other end has exited (torch 2.13)."""
HELPING = "running along with another process"
RESTING = "going back to the script"
UNFINISHED = "an error ended a pass over sharded parameters"
ADDING = "summing"


class Ranks:
    """All ranks of a training. `rank` is this one, `size` is the world size.

    Attributes: `group` (the process group that reduces gradients), `passing` (whether this rank is inside a pass that needs
    all ranks. If an error ends that pass, the others wait inside it, hear nothing, and only the end of this process releases
    them). A rank that ends helps the others until all have ended.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device, self.group = device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = None if group is None else dist.get_process_group_ranks(group)
        self._exchange = Exchange(dist.new_group(members, backend="gloo"), self.size)
        self._services: list[weakref.WeakMethod[Service]] = []
        self._passes: Passes | None = None
        self._resting = NOTHING, NOTHING
        self._over, self.passing = "", False
        atexit.register(self.end)

    @property
    def talk(self) -> Any:
        """The process group for messages."""
        return self._exchange.talk

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Gather a picklable value from every rank, by rank. Raises RankFailed if a rank failed or is gone."""
        self.meet(doing)
        try:
            return self._exchange.objects(value)
        except RuntimeError as error:
            raise self.lost(doing) from error

    def agree(self, numbers: Sequence[float], doing: str) -> list[list[float]]:
        """Gather numbers, the same count on every rank, in a single small exchange."""
        return self.meet(doing, numbers=numbers)

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks, at their next exchange, that this rank fails."""
        if getattr(error, "_memfit_said", False) or self._over or self.passing:
            return
        error._memfit_said = True  # type: ignore[attr-defined]
        self._over = f"rank {self.rank} failed: {_line_of(error)}"
        try:
            self._exchange.told(FAILED, "", patience=FAREWELL)
            self._exchange.objects(_line_of(error))
        except RuntimeError:
            return  # the others are gone too

    def serve(self, service: Service) -> int:
        """Register a bound method that ranks may `ask` for, by weak reference. Every rank registers the same services in the
        same order. Returns the code to `ask` with."""
        self._services.append(weakref.WeakMethod(service))  # type: ignore[arg-type]
        return len(self._services)

    def ask(self, service: int, doing: str, numbers: Sequence[float] = ()) -> None:
        """Have all ranks run this service at their next exchange; passes receive `numbers`. Raises RankFailed if a rank failed
        or is gone."""
        self.meet(doing, service, numbers)

    def meet(self, doing: str, want: int = NOTHING, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Synchronize the ranks: run the services that others ask for until none does, or ask for one. Returns every rank's
        numbers."""
        while True:
            told = self._told(doing, want, numbers)
            served = self._serve(told)
            if want in served or not served:
                return [each.numbers for each in told]

    def rest(self, *, alone: bool = False) -> None:
        """Help the others until no rank is in a pass. Called before returning to the script, which may run its own
        collectives. Waits until each rank reaches an exchange, or rests too. `alone`: after something the others need not do;
        resting ranks then wait until this one comes again. Raises RankFailed if a rank failed or is gone."""
        if self._passes is None:
            return
        mine, their = self._resting if alone else self._resting[::-1]
        running = True
        while running:
            told = self._told(RESTING, mine)
            self._serve(told)
            running = any(each.want >= PASSES or (each.want == their and not alone) for each in told)

    def _told(self, doing: str, want: int, numbers: Sequence[float] = ()) -> list[Told]:
        """Gather what every rank wants, with its numbers."""
        if self._over or self.passing:
            raise self._apart(doing, self._over or f"rank {self.rank} failed: {UNFINISHED}")
        try:
            told = self._exchange.told(want, doing, numbers)
        except RuntimeError as error:
            raise self.lost(doing) from error
        self._check(told, doing)
        return told

    @contextmanager
    def noticing(self, doing: str) -> Iterator[None]:
        """Turn errors that libraries raise inside because another rank is gone into RankFailed."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(word in str(error) for word in GONE):
                raise self.lost(doing) from error
            raise

    def pass_along(self, passes: Passes) -> None:
        """Register `passes`: from now on a pass needs all ranks."""
        self._passes, self._resting = passes, (self.serve(self._nothing), self.serve(self._nothing))

    def _nothing(self, asking: Sequence[int]) -> None:
        """Do nothing: ranks that ask for this service only wait."""

    def end(self) -> None:
        """Help the others until all have ended. Called at exit, when this rank is done or fails with an uncaught error."""
        error = getattr(sys, "last_value", None)  # set before Python prints the traceback of an uncaught error
        try:
            if error is not None and dist.is_initialized():
                self.failed(error)
            while not self._over and not self.passing and dist.is_initialized():
                told = self._exchange.told(ENDED, "")
                self._check(told, "ending", ending=True)
                if not self._serve(told):  # the others have ended too, or want another step and learn that there is none
                    self._over = "the script has ended"
                    return self._exchange.close()
        except (RuntimeError, ValueError):
            return  # the others are gone, or the process group is
        finally:
            self._exchange.settle()

    def everywhere(self, rank: int) -> int:
        """Return the global rank of one of these ranks."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """All-reduce each tensor (dense, contiguous) in place. Raises RankFailed if a rank is gone."""
        self.done([self.summing(tensor) for tensor in tensors])

    def summing(self, tensor: torch.Tensor) -> Launched:
        """Launch the all-reduce of one tensor without waiting. `done` waits for it."""
        return self._launched(lambda own: dist.all_reduce(own[0], group=self.group, async_op=True), [tensor])

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all ranks along the first dimension, whose size may differ. Raises RankFailed if a rank
        is gone."""
        counts = [int(length) for (length,) in self.agree([len(tensor)], ADDING)]
        padded = retry_on_oom(lambda: tensor.new_zeros((max(counts), *tensor.shape[1:])), self.device)
        padded[: len(tensor)] = tensor
        found = [retry_on_oom(lambda: torch.empty_like(padded), self.device) for _ in counts]
        gathered = self._launched(
            lambda own: dist.all_gather(list(own[1:]), own[0], group=self.group, async_op=True), [padded, *found]
        )
        self.done([gathered])
        return torch.cat([part[:count] for part, count in zip(found, counts)])

    def from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast each tensor from rank 0, in place. Raises RankFailed if a rank is gone."""
        first = self.everywhere(0)
        self.done(
            [self._launched(lambda own: dist.broadcast(own[0], first, group=self.group, async_op=True), [t]) for t in tensors]
        )

    def done(self, pending: Sequence[Launched]) -> None:
        """Wait for collectives in flight. Raises RankFailed if a rank is gone."""
        try:
            for launched in pending:
                launched.wait()
        except RuntimeError as error:
            raise self.lost(ADDING) from error
        for launched in pending:
            launched.settle()

    def _launched(self, collective: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]) -> Launched:
        """Launch a collective."""
        try:
            return Launched(collective, tensors)
        except BaseException as error:
            # Inside the collective the others hear nothing. Only the end of this process releases them: do not delay it.
            self._over = f"rank {self.rank} failed: {_line_of(error)}"
            raise

    def _serve(self, told: Sequence[Told]) -> set[int]:
        """Do what is asked for. Returns what was done: all services, and one pass."""
        wants = [each.want for each in told]
        asked = {want for want in wants if 0 < want < PASSES}
        for code in sorted(asked):
            service = self._services[code - 1]()
            if service is None:
                raise self._apart("helping another process", "what it asks for is gone")
            service([rank for rank, each in enumerate(told) if each.want == code])
        chosen = 0 if self._passes is None else self._passes.chosen(wants)
        if chosen and self._passes is not None:
            with self.noticing(HELPING):
                self.passing = True
                self._passes.do(chosen, wants[self.rank] == chosen, told[wants.index(chosen)].numbers)
                self.passing = False
        return asked | ({chosen} if chosen else set())

    def _check(self, told: Sequence[Told], doing: str, *, ending: bool = False) -> None:
        wants = [each.want for each in told]
        if FAILED in wants:
            texts = self._exchange.objects(None)
            time.sleep(BEHIND)
            raise self._apart(doing, "; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text))
        if ENDED in wants and not ending and max(wants) <= NOTHING:
            raise self._apart(doing, f"rank {_listed(wants, ENDED)} has reached the end of its script")
        places = [(each.place, len(each.numbers)) for each in told]
        other = [str(rank) for rank, place in enumerate(places) if place != places[self.rank]]
        if other and not any(wants):
            raise self._apart(doing, f"rank {', '.join(other)} is at another point in the script")

    def _apart(self, doing: str, found: str) -> RankFailed:
        self._over = found
        failed = " failed: " in found
        return RankFailed(
            f"{doing} over {self.size} processes",
            found=found,
            next_move="the traceback is in that rank's output; nothing of this step was applied on this rank"
            if failed
            else "let every process run the same number of steps, and end the training together",
        )

    def lost(self, doing: str) -> RankFailed:
        """Return the error for a rank that could not be reached."""
        self._over = "another process has ended, or cannot be reached"
        return RankFailed(
            f"{doing} over {self.size} processes",
            found=self._over,
            next_move="its own output says why; nothing of this step was applied on this rank",
        )


def _line_of(error: BaseException) -> str:
    """Format an error in one line, with the place that raised it."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemfitError):  # its message has that rank's own numbers
        text = f"{error.asked}: {error.found}"
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({Path(code.co_filename).name}:{trace.tb_lineno}, in {code.co_name})"
        trace = trace.tb_next
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def _listed(wants: Sequence[int], wanted: int) -> str:
    return ", ".join(str(rank) for rank, want in enumerate(wants) if want == wanted)
