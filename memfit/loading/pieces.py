"""From pieces, as a script's loader yields them, to effective batches.

A piece is the samples of one script batch, packed by a worker or kept where there are none. Not covered: collating, and
any order but the one the pieces come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from memfit._errors import UsageError
from memfit.loading.packing import Kept, Packed

Piece = Packed | Kept


class Counted(NamedTuple):
    """A batch and what is known about its size."""

    samples: int | None
    """Samples in the batch; None if unknown."""
    batch: Any
    """What the consumer is to have."""


@dataclass(frozen=True)
class CountingCollate:
    """The script's collate function, for batches that are passed on as they are: says how many samples went in."""

    collate_fn: Callable[[Any], Any]
    """The script's."""

    def __call__(self, samples: Any) -> Counted:
        return Counted(len(samples) if isinstance(samples, list) else None, self.collate_fn(samples))


def as_counted(batch: Any) -> Counted:
    """What comes out of the script's loader, with its count if there is one."""
    return batch if isinstance(batch, Counted) else Counted(None, batch)


@dataclass(frozen=True)
class Grouping:
    """How pieces become effective batches."""

    size: int
    """Samples in an effective batch; the least there are, if pieces stay whole."""
    whole: bool = False
    """Whether pieces are taken whole, never split between two effective batches."""
    drop_last: bool = False
    """Whether a last effective batch of fewer samples is dropped."""


class Regrouped(Iterator[Counted]):
    """Effective batches, made of `pieces`. Between two batches it holds what is left of one piece, nothing else.

    `finish` makes the batch of its index and its samples, a sequence that unpacks them one at a time. `counts`, where batches
    are divided among processes, gives of each batch the samples in it, and how many of those count. `first` is its first index.
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
            self._next = self._next or next(self._counts)  # once more where the dataset raised an error
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
        # An error leaves what is held in place: a script that catches it may go on with the next batch.
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
            self._ended, self._pieces = True, iter(())  # lets go of the workers
            return
        self._held += [(piece, i) for i in range(len(piece))]


class _Places(Sequence[Any]):
    """Samples that lie in several pieces, read where they lie."""

    def __init__(self, places: list[tuple[Piece, int]]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        # Not Sequence's own: that one takes an IndexError raised inside a sample for the end.
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
    if isinstance(piece, Kept):
        return piece
    if isinstance(piece, UsageError):
        try:
            raise piece
        finally:
            del piece  # an error that its own traceback refers to would keep the workers until the next collection
    raise UsageError(
        "effective batches put together from the batches of a DataLoader subclass",
        found=f"its own __iter__ yields {type(piece).__qualname__} objects, not what its collate_fn returns",
        next_move="pass a plain torch.utils.data.DataLoader over the same dataset",
    )
