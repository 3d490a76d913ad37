"""Which part of an effective batch is whose, and from which batch of an epoch on.

Every process holds the same, because it only changes by what all of them heard in the same step, and not before every one of
them has drawn the indices that it has drawn already: loaders draw ahead of the training. Not covered: loaders that are gone
through in another thread than the one that trains; there it is changed between epochs alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from memfit.batches.pieces import divided


class Shares:
    """The division of effective batches of `size` samples over `ranks` processes.

    Attributes: `latest` (samples of each process in a whole batch, by rank), `fixed` (whether it has to stay as it is).
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
        """An epoch begins, divided like this."""
        self.latest = tuple(latest)
        self._since, self._drawn, self._epochs = [(0, self.latest)], 0, self._epochs + 1

    def parts(self, number: int, samples: int) -> tuple[int, ...]:
        """How many of the `samples` of that effective batch are whose."""
        if self.fixed:
            return divided(samples, (1,) * self._ranks)
        return divided(samples, next(shares for since, shares in reversed(self._since) if since <= number))

    def drawing(self, number: int) -> None:
        """The indices of that effective batch are drawn now."""
        self._drawn, self._thread = number + 1, threading.get_ident()

    def position(self, thread: int | None) -> tuple[int, int]:
        """(epochs begun, the first effective batch of this one that may be divided in another way); the second is 0 where
        nothing may be, or was drawn yet, and -1 where only the next epoch may: `thread`, which trains, is not the one that
        draws."""
        if self.fixed or not self._drawn:
            return self._epochs, 0
        return self._epochs, self._drawn if self._thread == thread else -1

    def change(self, number: int, latest: Sequence[int]) -> None:
        """From effective batch `number` of this epoch on, divide like this."""
        self.latest = tuple(latest)
        self._since.append((number, self.latest))
