"""The exceptions memfit raises.

    MemfitError                 everything below; three parts: what was asked, what was found, what to do next
    |-- UsageError              an argument that cannot be meant (also a ValueError)
    |-- DoesNotFit              no plan fits the budget (also a ValueError)
    |-- PlanFileError           a plan file that is damaged, foreign or too new (also a ValueError)
    |-- Refused                 the training cannot be cut and stay the same, and memfit will not pretend (also a RuntimeError)
    `-- RankFailed              another process of this training failed, so that this one cannot go on (also a RuntimeError)

Exceptions raised inside the user's own code are never wrapped: they surface as themselves.
"""

from __future__ import annotations


class MemfitError(Exception):
    """An error in three parts, each in the reader's own numbers.

    `asked` is what the caller wanted, `found` what memfit met instead, `next_move` what to type or change.
    """

    def __init__(self, asked: str, *, found: str, next_move: str) -> None:
        super().__init__(asked, found, next_move)
        self.asked = asked
        self.found = found
        self.next_move = next_move

    def __str__(self) -> str:
        return f"{self.asked}\n  found: {self.found}\n  next:  {self.next_move}"

    def __reduce__(self):
        return _rebuild, (type(self), self.asked, self.found, self.next_move)


def first_line(error: BaseException) -> str:
    """What an exception says in its first line; its type where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _rebuild(kind: type[MemfitError], asked: str, found: str, next_move: str) -> MemfitError:
    return kind(asked, found=found, next_move=next_move)


class UsageError(MemfitError, ValueError):
    """An argument that cannot be meant as it stands."""


class DoesNotFit(MemfitError, ValueError):
    """No combination of the allowed levers fits into the budget."""

    enough: int = 0
    """Bytes of a budget that would do; 0 where that was not worked out."""


class PlanFileError(MemfitError, ValueError):
    """A plan file that is damaged, belongs to another model or was written by a later version."""


class Refused(MemfitError, RuntimeError):
    """Cutting this training into micro-batches would change it; the message names the place and the way out."""


class RankFailed(MemfitError, RuntimeError):
    """Another process of this training failed or is gone; what it was is in that process's own output."""
