"""Runs proofs once more without the script's autocast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from memfit._errors import MemfitError

T = TypeVar("T")


@dataclass
class _Suspension:
    """Whether something would have run under autocast."""

    found: bool = False


class _Suspensions(threading.local):
    """Those of this thread: autocast is one thread's, too."""

    def __init__(self) -> None:
        self.open: list[_Suspension] = []


_SUSPENDED = _Suspensions()


def without_autocast(prove: Callable[[], T]) -> T | None:
    """Return what a proof finds while modules compute in the precision of their parameters, where rounding hides less. None if
    they cannot, or memory runs out: results in full precision take more of it."""
    _SUSPENDED.open.append(_Suspension())
    try:
        return prove()
    except MemfitError:
        raise
    except Exception:
        if not _SUSPENDED.open[-1].found:
            raise
    finally:
        _SUSPENDED.open.pop()
    return None


def stays_on() -> bool:
    """Whether autocast that the script has enabled stays on; else notes that it is turned off."""
    if _SUSPENDED.open:
        _SUSPENDED.open[-1].found = True
    return not _SUSPENDED.open


def autocast_is_off() -> bool:
    """Whether autocast was turned off for a proof."""
    return bool(_SUSPENDED.open) and _SUSPENDED.open[-1].found
