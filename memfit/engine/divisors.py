"""Reads the denominators of a loss off its autograd graph: they give the weights of its micro-batches.

Finds divisions by one number, means, and linear operations on these. Not covered: compiled code, `autograd.Function`, half
precision divisors, which are rounded, and divisors whose saved tensors have hooks (reading these runs the hooks: checkpoints
recompute).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.engine.known_means import HALF

Number = float | torch.Tensor
"""A number on the host or on a device."""
How = str
"""How a divisor depends on the samples: one of ADDS, SAME, OTHERWISE."""
ADDS, SAME, OTHERWISE = "adds", "same", "otherwise"
CLOSE = 1e-5
"""Relative tolerance for equal divisors: scripts add small numbers to avoid division by zero."""
_MOST_NODES = 64
_LINEAR = frozenset(
    "Add Sub Rsub Mul Div Mean Neg Sum Nansum ToCopy Clone Alias View UnsafeView ReshapeAlias Squeeze Unsqueeze Expand Permute "
    "Transpose T Select Slice Index IndexSelect Gather Where MaskedFill MaskedSelect Stack Cat Unbind Split Diagonal".split()
)


class Divided:
    """The divisors of the micro-batches' losses, if a proof found `how` they depend on the samples."""

    def __init__(self, how: Sequence[How] | None) -> None:
        self._how = how or ()
        self._adds = ADDS in self._how
        self._weights: list[Number] = []
        self._rows: list[list[Number] | None] = []

    def add(self, loss: torch.Tensor, weight: Number, known: Sequence[Any] = ()) -> None:
        """Read the divisors of the next micro-batch's loss, whose weight is `weight`, skipping the means whose graphs end in
        the nodes `known`."""
        if self._how:
            self._weights.append(weight if self._adds else 1.0)
            self._rows.append(divisors_of(loss, known))

    def changed(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return what differs from the proof, or None. Synchronizes once if divisors are on the device."""
        if not self._how:
            return None
        rows = [row for row in self._rows if row is not None and len(row) == len(self._how)]
        if len(rows) < len(self._rows):
            return "the loss divides more often, or less, than when it was proven"
        numbers = [number for row in (self._weights, *rows) for number in row]
        if any(isinstance(number, FakeTensor) for number in numbers):
            return None
        numbers, count = read(numbers, device, dtype), len(self._how)
        weights, divisors = numbers[: len(rows)], numbers[len(rows) :]
        is_off = off_by(self._how, [divisors[i::count] for i in range(count)], weights) > CLOSE
        return "the loss's denominator is no longer proportional to the weights" if is_off else None

    def sums(self) -> list[Number]:
        """Return the sum of each divisor over all samples; NaN if it does not add up."""
        adds = [how == ADDS for how in self._how]
        return [sum(column) if each else math.nan for each, column in zip(adds, zip(*(row or () for row in self._rows)))]


def read(numbers: Sequence[Number], device: torch.device, dtype: torch.dtype) -> list[float]:
    """Return the numbers on the host. Synchronizes once if some are on the device."""
    there = [number.to(device, dtype) for number in numbers if isinstance(number, torch.Tensor)]
    found = iter(torch.stack(there).tolist() if there else ())
    return [next(found) if isinstance(number, torch.Tensor) else float(number) for number in numbers]


def divisors_of(loss: torch.Tensor, known: Sequence[Any] = ()) -> list[Number] | None:
    """Return the divisors of the terms that the loss is linear in, in graph order. Stops at the nodes `known`, of means that
    are weighted separately. None: the graph is too large."""
    found: list[Number] = []
    for visited, node in enumerate(linear_nodes(loss, known)):
        if visited >= _MOST_NODES:
            return None
        found += _divisor(node)
    return found


def linear_nodes(loss: torch.Tensor, ends: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of a loss's graph that it is linear in, down to the nodes `ends`, which are left out."""
    open_: list[Any] = [loss.grad_fn]
    seen = set(ends)
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        following = _linear_in(node)
        if following is None:
            continue
        seen.add(node)
        yield node
        open_ += following


def denominators(loss: torch.Tensor) -> dict[Any, float]:
    """Return, for each node that the loss is linear in, the product of the divisors between the two, those of the node
    included. NaN: one of them has several entries, or there are several ways from the node to the loss."""
    open_ = Counter(each for node in linear_nodes(loss) for each in _linear_in(node) or ())
    above, found, ready = {loss.grad_fn: 1.0}, dict[Any, float](), [loss.grad_fn]
    while ready:
        node = ready.pop()
        following = _linear_in(node)
        if following is None:
            continue
        found[node] = above[node] * _divisors_product(node)
        for each in following:
            open_[each] -= 1
            above[each] = found[node] if above.get(each, found[node]) == found[node] else math.nan
            ready += [] if open_[each] else [each]
    return found


def _linear_in(node: Any) -> list[Any] | None:
    """The nodes below a node that it is linear in, or None."""
    name = node.name().partition("Backward")[0]
    following = [each for each, _ in node.next_functions if each is not None]
    is_product = len(following) > 1 and name in ("Mul", "Div")  # linear in neither alone
    return None if name not in _LINEAR or is_product else following


def _divisors_product(node: Any) -> float:
    by = [float(number) for number in _divisor(node)]
    has_several = not by and node.name().startswith(("Mul", "Div"))
    return math.nan if has_several else math.prod(by)


def how_divided(whole: Sequence[Number] | None, parts: Sequence[Sequence[Number] | None]) -> tuple[How, ...] | None:
    """Return how each divisor of a full batch depends on its samples, given those of parts. None if numbers differ."""
    if whole is None or any(part is None or len(part) != len(whole) for part in parts):
        return None
    return tuple(_how(*map(float, column)) for column in zip(whole, *parts))  # type: ignore[arg-type]


def _how(whole: float, *parts: float) -> How:
    if all(_are_close(part, whole) for part in parts):
        return SAME
    excess = sum(parts) - whole  # 1 per empty part if a script clamps the divisor to 1
    return ADDS if -CLOSE * abs(whole) <= excess <= len(parts) else OTHERWISE


def off_by(how: Sequence[How], columns: Sequence[Sequence[float]], weights: Sequence[float]) -> float:
    """Return how far the divisors of parts of a batch, one column each, are from being proportional to the weights ([]: equal
    weights) if they add up, or from being equal if they are the same."""
    off = 0.0
    for each, column in zip(how, columns):
        numbers = [_snapped(number) for number in column]
        if each == ADDS:
            numbers = [n / weight for n, weight in zip(numbers, weights or [1.0] * len(numbers)) if weight]
        if each != OTHERWISE and numbers:
            largest = max(map(abs, numbers))
            off = max(off, (max(numbers) - min(numbers)) / largest if largest else 0.0)
    return off


def _snapped(number: float) -> float:
    """A number without the small addend (eps) that avoids division by zero."""
    return float(round(number)) if math.isfinite(number) and _are_close(number, round(number)) else number


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))


def _divisor(node: Any) -> list[Number]:
    name = node.name().partition("Backward")[0]
    if name == "Mean":
        return [float(_averaged(node))]
    if name not in ("Div", "Mul"):
        return []
    side = "self" if node.next_functions[0][0] is None else "other"
    saved = getattr(node, f"_raw_saved_{side}", None)
    if saved is None or getattr(saved, "unpack_hook", None) is not None:
        return [math.nan]  # another node, or with hooks
    by: torch.Tensor = getattr(node, f"_saved_{side}")
    if by.dim() or by.is_complex():
        return []
    if by.dtype in HALF:
        return [math.nan]
    number: Number = by
    if by.device.type == "cpu" and not isinstance(by, FakeTensor):
        with _disable_current_modes():  # modes do not see Python numbers as tensors
            number = float(by)
    if name == "Div":
        return [number]
    return [1.0 / number if isinstance(number, torch.Tensor) or number else math.inf]


def _averaged(node: Any) -> int:
    """The number of entries that a mean node averages."""
    sizes = node._saved_self_sym_sizes
    along = [d if d < len(sizes) else d - 2**64 for d in getattr(node, "_saved_dim", ())]  # negative: read as unsigned
    return math.prod(sizes[d] for d in along) if along else math.prod(sizes)
