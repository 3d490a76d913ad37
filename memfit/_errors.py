"""The exceptions that memfit raises.

    MemfitError                 base class; three parts: what was asked, what was found, what to do next
    |-- UsageError              an invalid argument (also a ValueError)
    |-- DoesNotFit              no plan fits the budget (also a ValueError)
    |-- PlanFileError           a plan file that is damaged, for another model or too new (also a ValueError)
    |-- Refused                 micro-batches would change the result of this training (also a RuntimeError)
    `-- RankFailed              another rank failed, so this one cannot continue (also a RuntimeError)

Exceptions from the user's own code are never wrapped.
"""

from __future__ import annotations


class MemfitError(Exception):
    """Base class of memfit's errors. The message has three parts, with the user's own numbers.

    `asked` is what the caller wanted, `found` is what memfit found instead, `next_move` is what to type or change.
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
    """Return the first line of an exception's message, or the name of its type if the message is empty."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _rebuild(kind: type[MemfitError], asked: str, found: str, next_move: str) -> MemfitError:
    return kind(asked, found=found, next_move=next_move)


class UsageError(MemfitError, ValueError):
    """Raised for an invalid argument."""


class DoesNotFit(MemfitError, ValueError):
    """Raised if no combination of the allowed levers fits into the budget."""

    enough: int = 0
    """Size in bytes of a budget that would suffice; 0 if unknown."""


class PlanFileError(MemfitError, ValueError):
    """Raised for a plan file that is damaged, belongs to another model or was written by a later version."""


class Refused(MemfitError, RuntimeError):
    """Raised if micro-batches would change the result of this training. The message names the place and a workaround."""


class RankFailed(MemfitError, RuntimeError):
    """Raised if another rank of this training failed or exited. That rank's own output has the cause."""
