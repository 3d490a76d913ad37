"""The processes of one training, seen from one of them: what they tell each other, and sums over all.

What is agreed on goes over a gloo group of its own, apart from gradients: there a process that failed can still tell the
others, whatever its device is doing. Every exchange says where its sender is and whether it failed or has ended, so that nobody
waits for a process that has given up or is elsewhere in its script. A process may ask for what takes all of them (a whole state
dict, on rank 0 alone): the others come to its help at their next exchange, whatever that is about. Not covered: a process that
hangs without failing; the group's own time limit ends that.
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
from memfit.hardware.exhausted import patiently
from memfit.ranks.exchange import Exchange, Told
from memfit.ranks.launched import Launched
from memfit.ranks.passes import PASSES, Passes

FAREWELL = timedelta(seconds=30)
"""How long a process that failed waits for the others to hear of it before it raises its own error."""
BEHIND = 1.0
"""Seconds that a process which hears of another's error waits: its traceback comes first, and launchers take it for the
cause."""
NOTHING, FAILED, ENDED = 0, -1, -2
"""What a process wants of the others beside their exchange; a service, where it is above zero."""
Service = Callable[[Sequence[int]], None]
"""What all processes do for those (ranks) that ask for it."""
GONE = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport")
"""What gloo says where a process at the other end has ended (torch 2.13)."""
HELPING = "running along with another process"
RESTING = "going back to the script"
UNFINISHED = "an error ended a pass over parameters that are held in parts"
ADDING = "adding up over all processes"


class Ranks:
    """All processes of a training; `rank` is this one, `size` how many there are.

    Attributes: `group` (the process group that gradients are reduced over), `passing` (whether this process is inside a pass
    that takes all of them: where an error ended it, the others wait in there, hear nothing, and are released by the end of
    this process alone). Processes that end help the others until all do.
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
        """The process group of what is agreed on."""
        return self._exchange.talk

    def gather(self, value: Any, doing: str) -> list[Any]:
        """What every process gives, by rank; any picklable value. Raises RankFailed where one failed or is gone."""
        self.meet(doing)
        try:
            return self._exchange.objects(value)
        except RuntimeError as error:
            raise self.lost(doing) from error

    def agree(self, numbers: Sequence[float], doing: str) -> list[list[float]]:
        """As `gather` for the same count of numbers everywhere, in a single small exchange."""
        return self.meet(doing, numbers=numbers)

    def failed(self, error: BaseException) -> None:
        """Let the others know, at their next exchange, that this process fails."""
        if getattr(error, "_memfit_said", False) or self._over or self.passing:
            return
        error._memfit_said = True  # type: ignore[attr-defined]
        self._over = f"rank {self.rank} failed: {_line_of(error)}"
        try:
            self._exchange.told(FAILED, "", patience=FAREWELL)
            self._exchange.objects(_line_of(error))
        except RuntimeError:
            return  # the others are gone, too

    def serve(self, service: Service) -> int:
        """From now on a process may `ask` for this method of an object, which it does not keep alive; every process registers
        the same, in the same order. Returns what to ask by."""
        self._services.append(weakref.WeakMethod(service))  # type: ignore[arg-type]
        return len(self._services)

    def ask(self, service: int, doing: str, numbers: Sequence[float] = ()) -> None:
        """Have all processes do this, once they come to their next exchange; passes are told `numbers`. Raises RankFailed where
        one failed or is gone."""
        self.meet(doing, service, numbers)

    def meet(self, doing: str, want: int = NOTHING, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Come together: do what other processes ask for, until none does; or ask for something oneself. Returns the numbers
        that each came with."""
        while True:
            told = self._told(doing, want, numbers)
            served = self._serve(told)
            if want in served or not served:
                return [each.numbers for each in told]

    def rest(self, *, alone: bool = False) -> None:
        """Help the others until none is in a pass any more: before this process goes back to its script, which may come to a
        collective of its own. Waits until each of them comes to an exchange, or rests as well; one that rests `alone`, after
        what the others need not do, comes again. Raises RankFailed where one failed or is gone."""
        if self._passes is None:
            return
        mine, their = self._resting if alone else self._resting[::-1]
        running = True
        while running:
            told = self._told(RESTING, mine)
            self._serve(told)
            running = any(each.want >= PASSES or (each.want == their and not alone) for each in told)

    def _told(self, doing: str, want: int, numbers: Sequence[float] = ()) -> list[Told]:
        """What every process wants, and the numbers that it came with."""
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
        """What libraries raise inside where another process is gone, as RankFailed."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(word in str(error) for word in GONE):
                raise self.lost(doing) from error
            raise

    def pass_along(self, passes: Passes) -> None:
        """From now on passes take all processes."""
        self._passes, self._resting = passes, (self.serve(self._nothing), self.serve(self._nothing))

    def _nothing(self, asking: Sequence[int]) -> None:
        """Those that ask for this only wait."""

    def end(self) -> None:
        """This process has done all it does, or fails with an error that nobody caught; it helps the others until they have
        ended, too."""
        error = getattr(sys, "last_value", None)  # Python sets it before it prints the traceback of its last error
        try:
            if error is not None and dist.is_initialized():
                self.failed(error)
            while not self._over and not self.passing and dist.is_initialized():
                told = self._exchange.told(ENDED, "")
                self._check(told, "ending", ending=True)
                if not self._serve(told):  # the others have ended as well, or want another step, and learn that there is none
                    self._over = "the script has ended"
                    return self._exchange.close()
        except (RuntimeError, ValueError):
            return  # the others are gone, or their process group is
        finally:
            self._exchange.settle()

    def everywhere(self, rank: int) -> int:
        """The number of one of these processes among all that there are."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor (dense, contiguous) summed over all processes, in place. Raises RankFailed where one is gone."""
        self.done([self.summing(tensor) for tensor in tensors])

    def summing(self, tensor: torch.Tensor) -> Launched:
        """As `sum` of one tensor, under way until `done`."""
        return self._launched(lambda own: dist.all_reduce(own[0], group=self.group, async_op=True), [tensor])

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        """The processes' tensors, alike but for their first dimension, one after the other by rank. Raises RankFailed where one
        is gone."""
        counts = [int(length) for (length,) in self.agree([len(tensor)], ADDING)]
        padded = patiently(lambda: tensor.new_zeros((max(counts), *tensor.shape[1:])), self.device)
        padded[: len(tensor)] = tensor
        found = [patiently(lambda: torch.empty_like(padded), self.device) for _ in counts]
        gathered = self._launched(
            lambda own: dist.all_gather(list(own[1:]), own[0], group=self.group, async_op=True), [padded, *found]
        )
        self.done([gathered])
        return torch.cat([part[:count] for part, count in zip(found, counts)])

    def from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor as rank 0 has it, in place. Raises RankFailed where one process is gone."""
        first = self.everywhere(0)
        self.done(
            [self._launched(lambda own: dist.broadcast(own[0], first, group=self.group, async_op=True), [t]) for t in tensors]
        )

    def done(self, pending: Sequence[Launched]) -> None:
        """Wait for what is under way. Raises RankFailed where a process is gone."""
        try:
            for launched in pending:
                launched.wait()
        except RuntimeError as error:
            raise self.lost(ADDING) from error
        for launched in pending:
            launched.settle()

    def _launched(self, collective: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]) -> Launched:
        """A collective under way."""
        try:
            return Launched(collective, tensors)
        except BaseException as error:
            # They hear nothing in there: only the end of this process releases them, which therefore is not put off.
            self._over = f"rank {self.rank} failed: {_line_of(error)}"
            raise

    def _serve(self, told: Sequence[Told]) -> set[int]:
        """Do what is asked for; returns what was done: all services, and one pass."""
        wants = [each.want for each in told]
        asked = {want for want in wants if 0 < want < PASSES}
        for code in sorted(asked):
            service = self._services[code - 1]()
            if service is None:
                raise self._apart("helping another process", "what it asks for is no longer here")
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
            raise self._apart(doing, f"rank {_listed(wants, ENDED)} has come to the end of its script")
        places = [(each.place, len(each.numbers)) for each in told]
        other = [str(rank) for rank, place in enumerate(places) if place != places[self.rank]]
        if other and not any(wants):
            raise self._apart(doing, f"rank {', '.join(other)} is at another place of the script")

    def _apart(self, doing: str, found: str) -> RankFailed:
        self._over = found
        failed = " failed: " in found
        return RankFailed(
            f"{doing} over {self.size} processes",
            found=found,
            next_move="the traceback is in that rank's output; nothing of this step was applied on this rank"
            if failed
            else "let every process do the same number of steps, and leave the training together",
        )

    def lost(self, doing: str) -> RankFailed:
        """The error to raise where another process could not be reached."""
        self._over = "another process has ended, or cannot be reached"
        return RankFailed(
            f"{doing} over {self.size} processes",
            found=self._over,
            next_move="its own output says why; nothing of this step was applied on this rank",
        )


def _line_of(error: BaseException) -> str:
    """An error in a line, with the place it was raised at."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemfitError):  # with that process's own numbers
        text = f"{error.asked}: {error.found}"
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({Path(code.co_filename).name}:{trace.tb_lineno}, in {code.co_name})"
        trace = trace.tb_next
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def _listed(wants: Sequence[int], wanted: int) -> str:
    return ", ".join(str(rank) for rank, want in enumerate(wants) if want == wanted)
