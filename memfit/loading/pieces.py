"""Regroups pieces, as a script's loader yields them, into effective batches.

A piece is the samples of one script batch, packed by a worker or kept as they are without workers. Not covered:
collating, and any other order than that of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from memfit._errors import UsageError
from memfit.loading.packing import LocalSamples, Packed

Piece = Packed | LocalSamples


class Counted(NamedTuple):
    """Holds a batch and the number of its samples."""

    samples: int | None
    """Samples in the batch; None if unknown."""
    batch: Any
    """What the consumer gets."""


@dataclass(frozen=True)
class CountingCollate:
    """Wraps the script's collate function for batches that pass through, and also counts the samples that went in."""

    collate_fn: Callable[[Any], Any]
    """The script's own collate function."""

    def __call__(self, samples: Any) -> Counted:
        return Counted(len(samples) if isinstance(samples, list) else None, self.collate_fn(samples))


def as_counted(batch: Any) -> Counted:
    """Return a batch from the script's loader with its count, if there is one."""
    return batch if isinstance(batch, Counted) else Counted(None, batch)


@dataclass(frozen=True)
class Grouping:
    """Describes how pieces become effective batches."""

    size: int
    """Samples in an effective batch; the minimum, if pieces stay whole."""
    whole: bool = False
    """Whether pieces stay whole, never split between two effective batches."""
    drop_last: bool = False
    """Whether a last effective batch of fewer samples is dropped."""


class Regrouped(Iterator[Counted]):
    """Yields effective batches made of `pieces`. Between two batches it holds only the rest of one piece.

    `finish` makes a batch from its index and its samples, a sequence that unpacks them one at a time. If batches are divided
    among ranks, `counts` gives the samples in each batch, and how many of those count. `first` is the index of the first batch.
    """

    def __init__(
        self,
        pieces: Iterator[Any],
        grouping: Grouping,
        finish: Callable[[int, Sequence[Any]], Any],
        counts: Iterator[tuple[int, int]] | None = None,
        first: int = 0,
    ) -> None:
        self._pieces = pieces
        self._grouping = grouping
        self._finish = finish
        self._counts = counts
        self._next: tuple[int, int] | None = None
        self._held: list[tuple[Piece, int]] = []
        self._ended = False
        self._index = first - 1

    def __next__(self) -> Counted:
        counted = None
        if self._counts is None:
            samples = _Places(self._gather())
        else:
            self._next = self._next or next(self._counts)  # the same again after an error in the dataset
            samples, counted = _Places(self._gather_exactly(self._next[0])), self._next[1]
            self._next = None
        self._index += 1
        return Counted(len(samples) if counted is None else counted, self._finish(self._index, samples))

    def _gather_exactly(self, size: int) -> list[tuple[Piece, int]]:
        while len(self._held) < size and not self._ended:
            self._hold_next()
        places, self._held = self._held[:size], self._held[size:]
        return places

    def _gather(self) -> list[tuple[Piece, int]]:
        size = self._grouping.size
        # An error leaves the held samples in place: a script that catches it may continue with the next batch.
        while len(self._held) < size and not self._ended:
            self._hold_next()
        taken = len(self._held) if self._grouping.whole else size
        places, self._held = self._held[:taken], self._held[taken:]
        if not places or (self._grouping.drop_last and len(places) < size):
            raise StopIteration
        return places

    def _hold_next(self) -> None:
        try:
            piece = _received(next(self._pieces))
        except StopIteration:
            self._ended, self._pieces = True, iter(())  # releases the workers
            return
        self._held += [(piece, i) for i in range(len(piece))]


class _Places(Sequence[Any]):
    """Samples spread over several pieces, read in place."""

    def __init__(self, places: list[tuple[Piece, int]]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        # Not Sequence.__iter__, which takes an IndexError raised inside a sample for the end.
        return (piece[i] for piece, i in self._places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [piece[i] for piece, i in self._places[index]]
        piece, i = self._places[index]
        return piece[i]


def _received(piece: Any) -> Piece:
    if isinstance(piece, Packed):
        return piece.owned()  # every piece in shared memory costs a file descriptor, and there may be thousands
    if isinstance(piece, LocalSamples):
        return piece
    if isinstance(piece, UsageError):
        try:
            raise piece
        finally:
            del piece  # a reference cycle with its traceback would keep the workers until the next garbage collection
    raise UsageError(
        "effective batches put together from the batches of a DataLoader subclass",
        found=f"its own __iter__ yields {type(piece).__qualname__} objects, not what its collate_fn returns",
        next_move="pass a plain torch.utils.data.DataLoader over the same dataset",
    )
