"""Runs proofs without the script's autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class _Suspension:
    """Whether something would have run under autocast."""

    found: bool = False


_SUSPENDED: list[_Suspension] = []


def without_autocast(prove: Callable[[], T]) -> T:
    """Return what a proof finds while modules compute in the precision of their parameters: which samples compute something
    together, and how, does not depend on it, and rounding hides less. Where they cannot, they compute as the script says."""
    _SUSPENDED.append(_Suspension())
    try:
        return prove()
    except Exception:
        if not _SUSPENDED[-1].found:
            raise
    finally:
        _SUSPENDED.pop()
    return prove()


def stays_on() -> bool:
    """Whether autocast that the script has enabled stays on; else notes that it is turned off."""
    if _SUSPENDED:
        _SUSPENDED[-1].found = True
    return not _SUSPENDED


def autocast_is_off() -> bool:
    """Whether autocast was turned off for a proof."""
    return bool(_SUSPENDED) and _SUSPENDED[-1].found
