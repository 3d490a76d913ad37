"""Gradients summed over processes while a backward still computes others: buckets of fixed content, launched in a fixed order.

Buckets follow the parameters backwards, about as their gradients become ready. Small gradients travel in lanes that are there
before; large ones are reduced where they lie, in parts no larger than a lane, so that a process whose backward failed can bring
zeros in a lane for whatever the others still bring. Not covered: sparse gradients and those of half precision, which are
reduced after the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.ranks import buckets
from memfit.ranks.ranks import Ranks

LANES = 2
"""Buckets of small gradients that are under way at once."""
ALIGNED = 64
"""Bytes that lanes begin at multiples of."""
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Bucket:
    """What one collective carries."""

    places: tuple[int, ...]
    """The parameters whose gradients, or a part of one, it carries: their places among those of `Buckets`."""
    dtype: torch.dtype
    """Of all of them."""
    sizes: tuple[int, ...]
    """Elements of each that it carries."""
    start: int | None = None
    """Where the part of a gradient begins that is reduced where it lies; None: they travel in a lane."""

    @property
    def numel(self) -> int:
        """Elements in all."""
        return sum(self.sizes)


class Buckets:
    """Which collectives carry the gradients of which parameters: the same on every process that builds them for the same ones.

    Attributes: `parameters` (those whose gradients they carry), `order` (the collectives, as they are launched), `lanes` (the
    memory of those that are under way at once).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        size = buffer.numel() // LANES // ALIGNED * ALIGNED
        self.lanes = buffer[: LANES * size].split(size) if size else ()
        self.parameters = [p for p in parameters if _travels(p, size)]
        self.order: list[Bucket] = []
        for place in reversed(range(len(self.parameters))):
            self._add(place, self.parameters[place], size)

    def lies_alone(self, place: int) -> bool:
        """Whether this gradient is reduced where it lies."""
        return _lies_alone(self.parameters[place], self._capacity)

    @property
    def nbytes(self) -> int:
        """Bytes that all of them carry."""
        return sum(bucket.numel * bucket.dtype.itemsize for bucket in self.order)

    @property
    def _capacity(self) -> int:
        return self.lanes[0].numel() if self.lanes else 0

    def _add(self, place: int, parameter: torch.Tensor, capacity: int) -> None:
        most, count, dtype = capacity // parameter.element_size(), parameter.numel(), parameter.dtype
        if _lies_alone(parameter, capacity):
            starts = range(0, count, most)
            self.order += [Bucket((place,), dtype, (min(most, count - start),), start) for start in starts]
            return
        last = next((i for i in reversed(range(len(self.order))) if self.order[i].start is None), None)
        if last is not None and self.order[last].dtype is dtype and self.order[last].numel + count <= most:
            # (a bucket waits for its last gradient, and the collectives behind it with it)
            before = self.order.pop(last)
            self.order.append(Bucket((*before.places, place), dtype, (*before.sizes, count)))
        else:
            self.order.append(Bucket((place,), dtype, (count,)))


class Flight:
    """The sums of one backward over all processes, each launched once its gradients are there and those before it are launched.

    Attribute: `launched` (collectives so far).
    """

    def __init__(self, ranks: Ranks, made: Buckets) -> None:
        self.launched = 0
        self._ranks, self._made = ranks, made
        self._gradients: dict[int, torch.Tensor] = {}
        self._lane = 0
        self._in_lanes: list[tuple[Any, list[torch.Tensor], list[torch.Tensor]] | None] = [None] * LANES
        self._in_place: list[Any] = []
        self._broken = False

    def holds(self, place: int) -> bool:
        """Whether this gradient is there already."""
        return place in self._gradients

    def arrived(self, place: int, gradient: torch.Tensor) -> None:
        """This gradient is complete; from now on it is the flight's to change."""
        self._gradients[place] = gradient
        self._launch(waiting=False)

    def finish(self, rest: Callable[[int], torch.Tensor]) -> None:
        """Launch what is left, of gradients that `rest` gives, and wait for all. Raises RankFailed where a process is gone."""
        for place in range(len(self._made.parameters)):
            if place not in self._gradients:
                self._gradients[place] = rest(place)
        self._launch(waiting=True)
        for lane in range(LANES):
            self._lands(lane, waiting=True)
        self._ranks.done(self._in_place)

    def abandon(self) -> None:
        """This process has no gradients to bring: zeros in their places, so that the others come to an end. All sums of this
        backward are void. Raises RankFailed where a process is gone."""
        if self._broken:
            return
        for bucket in self._made.order[self.launched :]:
            self._clear(self._lane)
            flat = self._flat(bucket).zero_()
            self._in_lanes[self._lane] = self._begun(flat), [], []
            self._lane = (self._lane + 1) % LANES
        for lane in range(LANES):
            self._clear(lane)
        self._ranks.done(self._in_place)

    def _launch(self, *, waiting: bool) -> None:
        while self.launched < len(self._made.order):
            bucket = self._made.order[self.launched]
            if any(place not in self._gradients for place in bucket.places):
                return
            gradients = [self._gradients[place] for place in bucket.places]
            if bucket.start is not None:
                part = gradients[0].view(-1)[bucket.start : bucket.start + bucket.numel]
                self._in_place.append(self._begun(part))
            elif self._lands(self._lane, waiting=waiting):
                flat = self._flat(bucket)
                room = [part.view(g.shape) for part, g in zip(flat.split(list(bucket.sizes)), gradients)]
                torch._foreach_copy_(room, gradients)  # pyright: ignore[reportPrivateImportUsage]
                self._in_lanes[self._lane] = self._begun(flat), gradients, room
                self._lane = (self._lane + 1) % LANES
            else:
                return

    def _begun(self, tensor: torch.Tensor) -> Any:
        try:
            work = self._ranks.summing(tensor)
        except BaseException:
            self._broken = True
            raise
        self.launched += 1
        return work

    def _lands(self, lane: int, *, waiting: bool) -> bool:
        """Whether nothing is under way in this lane any more; what was is back in its gradients."""
        flying = self._in_lanes[lane]
        if flying is None:
            return True
        work, gradients, room = flying
        if not waiting and not work.is_completed():
            return False
        self._ranks.done([work])
        if gradients:
            torch._foreach_copy_(gradients, room)  # pyright: ignore[reportPrivateImportUsage]
        self._in_lanes[lane] = None
        return True

    def _clear(self, lane: int) -> None:
        flying, self._in_lanes[lane] = self._in_lanes[lane], None
        if flying is not None:
            self._ranks.done([flying[0]])

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        size = bucket.numel * bucket.dtype.itemsize
        return self._made.lanes[self._lane][:size].view(bucket.dtype)


def _travels(parameter: torch.Tensor, capacity: int) -> bool:
    """Whether gradients of this parameter can be reduced while others are still computed."""
    size = parameter.numel() * parameter.element_size()
    plain = parameter.layout is torch.strided and parameter.dtype in DTYPES
    return plain and 0 < size and (size <= capacity or parameter.is_contiguous()) and parameter.element_size() <= capacity


def _lies_alone(parameter: torch.Tensor, capacity: int) -> bool:
    size = parameter.numel() * parameter.element_size()
    return size > capacity or (size >= buckets.ALONE and parameter.is_contiguous())
