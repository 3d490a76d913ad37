"""Tracks which part of an effective batch each rank has, and the batch of an epoch where that begins.

Every rank holds the same division: it changes only by what all ranks received in the same step, and only for batches whose
indices no rank has drawn yet, because loaders draw ahead of the training. Not covered: loaders iterated in another thread than
the one that trains; their division changes only between epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from memfit.batches.pieces import divided


class Shares:
    """Divides effective batches of `size` samples among `ranks` ranks.

    Attributes: `latest` (samples of each rank in a whole batch, by rank), `fixed` (whether the division has to stay even).
    """

    def __init__(self, size: int, ranks: int) -> None:
        self.latest = divided(size, (1,) * ranks)
        self.fixed = False
        self._ranks = ranks
        self._since: list[tuple[int, tuple[int, ...]]] = [(0, self.latest)]
        self._epochs = 0
        self._drawn = 0
        self._thread: int | None = None

    def begin(self, latest: Sequence[int]) -> None:
        """Begin an epoch with this division."""
        self.latest = tuple(latest)
        self._since, self._drawn, self._epochs = [(0, self.latest)], 0, self._epochs + 1

    def parts(self, number: int, samples: int) -> tuple[int, ...]:
        """Return how many of the `samples` of effective batch `number` each rank has."""
        if self.fixed:
            return divided(samples, (1,) * self._ranks)
        return divided(samples, next(shares for since, shares in reversed(self._since) if since <= number))

    def drawing(self, number: int) -> None:
        """Record that the indices of effective batch `number` are drawn now."""
        self._drawn, self._thread = number + 1, threading.get_ident()

    def position(self, thread: int | None) -> tuple[int, int]:
        """Return (epochs begun, the first effective batch of this one whose division may change). The second is 0 if none may,
        or none was drawn yet, and -1 if only the next epoch may: `thread`, which trains, is not the one that draws."""
        if self.fixed or not self._drawn:
            return self._epochs, 0
        return self._epochs, self._drawn if self._thread == thread else -1

    def change(self, number: int, latest: Sequence[int]) -> None:
        """Divide like this, starting with effective batch `number` of this epoch."""
        self.latest = tuple(latest)
        self._since.append((number, self.latest))
