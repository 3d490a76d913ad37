"""Whether two values that state may have are the same, up to rounding."""

from __future__ import annotations

import array
from collections import deque
from numbers import Rational
from typing import Any

import torch

from memfit.engine.compose_state import is_number, items_of
from memfit.engine.places import MISSING
from memfit.engine.rewindable import IteratorPosition
from memfit.equivalence.tolerances import relative_difference, tolerance


def _rounding(number: Any) -> float:
    """Return the rounding tolerance for such numbers: double precision for Python's, their own dtype for NumPy's."""
    return tolerance(getattr(torch, str(getattr(number, "dtype", "float64")), torch.float32))


def as_tensor(value: Any) -> Any:
    """Return a tensor over a NumPy array's memory; return anything else unchanged."""
    return torch.from_numpy(value) if type(value).__name__ == "ndarray" and value.dtype.kind in "fciub" else value


def same(a: Any, b: Any, closely: float = 1.0) -> bool:
    """Whether two values are equal up to rounding. Objects of one type that cannot be compared count as equal."""
    if a is b:
        return True
    a, b = as_tensor(a), as_tensor(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b, closely)
    if is_number(a) and is_number(b):
        return bool(a == b) or (not isinstance(a, Rational) and abs(a - b) <= closely * _rounding(a) * max(abs(a), abs(b)))
    if isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        return len(a) == len(b) and all(same(x, y, closely) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], closely) for key in a)
    held = items_of(a), items_of(b)
    if type(a) is type(b) and None not in held:
        try:
            return same(*held, closely)
        except RecursionError:  # it holds itself
            return True
    if type(a).__name__ == type(b).__name__ == "ndarray":
        return _same_arrays(a, b)
    if a is MISSING or b is MISSING or isinstance(a, _COMPARED) or isinstance(b, _COMPARED):
        return type(a) is type(b) and bool(a == b)
    return type(a) is type(b)


_COMPARED = (str, bool, bytes, bytearray, array.array, set, frozenset, torch.Tensor, IteratorPosition)


def _same_arrays(a: Any, b: Any) -> bool:
    """Compare NumPy arrays of kinds that torch does not have, such as records."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _same_tensors(a: torch.Tensor, b: torch.Tensor, closely: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        return relative_difference(a, b) <= closely * tolerance(a.dtype)
    return bool(torch.equal(a, b))


def difference_of(a: Any, b: Any) -> float:
    """Return the relative difference of two values that are not the same; 1 if they are no numbers."""
    a, b = as_tensor(a), as_tensor(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point():
        return relative_difference(a, b)
    return float(abs(a - b) / max(abs(a), abs(b))) if is_number(a) and is_number(b) and a != b else 1.0
