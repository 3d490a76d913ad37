"""All-reduces gradients while a backward still computes others: buckets of fixed content, launched in a fixed order.

Buckets follow the parameters in reverse, about as their gradients become ready. Small gradients travel in lanes, which are
allocated up front. Large ones are reduced in place, in parts no larger than a lane, so that a rank whose backward failed can
contribute zeros in a lane for every remaining bucket. Not covered: sparse and half-precision gradients, which are reduced
after the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.ranks import buckets
from memfit.ranks.ranks import Ranks

LANES = 2
"""Buckets of small gradients that may be in flight at once."""
ALIGNED = 64
"""Alignment of lanes in bytes."""
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Bucket:
    """The gradients that one collective carries."""

    places: tuple[int, ...]
    """The parameters whose gradients, or a part of one, it carries, as indices into `Buckets.parameters`."""
    dtype: torch.dtype
    """The dtype of all of them."""
    sizes: tuple[int, ...]
    """Number of elements of each that it carries."""
    start: int | None = None
    """Offset of the part of a gradient that is reduced in place; None: the gradients travel in a lane."""

    @property
    def numel(self) -> int:
        """Number of elements in total."""
        return sum(self.sizes)


class Buckets:
    """Assigns gradients to collectives. The assignment is the same on every rank that builds it for the same parameters.

    Attributes: `parameters` (those whose gradients travel), `order` (the collectives in launch order), `lanes` (the memory of
    those in flight at once).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        size = buffer.numel() // LANES // ALIGNED * ALIGNED
        self.lanes = buffer[: LANES * size].split(size) if size else ()
        self.parameters = [p for p in parameters if _travels(p, size)]
        self.order: list[Bucket] = []
        for place in reversed(range(len(self.parameters))):
            self._add(place, self.parameters[place], size)

    def lies_alone(self, place: int) -> bool:
        """Whether this gradient is reduced in place."""
        return _lies_alone(self.parameters[place], self._capacity)

    @property
    def nbytes(self) -> int:
        """Number of bytes that all collectives carry."""
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
            # A bucket waits for its last gradient, and so do the collectives behind it.
            before = self.order.pop(last)
            self.order.append(Bucket((*before.places, place), dtype, (*before.sizes, count)))
        else:
            self.order.append(Bucket((place,), dtype, (count,)))


class Flight:
    """The all-reduces of one backward. Each is launched once its gradients are ready and those before it are launched.

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
        """Whether this gradient is ready."""
        return place in self._gradients

    def arrived(self, place: int, gradient: torch.Tensor) -> None:
        """Accept a complete gradient. From now on the flight may overwrite it."""
        self._gradients[place] = gradient
        self._launch(waiting=False)

    def finish(self, rest: Callable[[int], torch.Tensor]) -> None:
        """Launch the rest, with gradients from `rest`, and wait for all. Raises RankFailed if a rank is gone."""
        for place in range(len(self._made.parameters)):
            if place not in self._gradients:
                self._gradients[place] = rest(place)
        self._launch(waiting=True)
        for lane in range(LANES):
            self._lands(lane, waiting=True)
        self._ranks.done(self._in_place)

    def abandon(self) -> None:
        """Contribute zeros for the remaining buckets, because this rank has no gradients, so that the others finish. All sums
        of this backward are invalid. Raises RankFailed if a rank is gone."""
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
        """Whether this lane is free. Copies a completed result back into its gradients."""
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
    """Whether gradients of this parameter can be reduced during the backward."""
    size = parameter.numel() * parameter.element_size()
    plain = parameter.layout is torch.strided and parameter.dtype in DTYPES
    return plain and 0 < size and (size <= capacity or parameter.is_contiguous()) and parameter.element_size() <= capacity


def _lies_alone(parameter: torch.Tensor, capacity: int) -> bool:
    size = parameter.numel() * parameter.element_size()
    return size > capacity or (size >= buckets.ALONE and parameter.is_contiguous())
