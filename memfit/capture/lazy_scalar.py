"""Lazy scalars of a full batch: deferred losses, their sums and their products with constants.

Functions are identified by object, not by name: `div_` writes in place, `div` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.expression import Term
from memfit.capture.lazy_views import named

Constant = int | float | torch.Tensor
"""A value that does not depend on the call: a number, or a tensor with one entry."""
ScalarOf = Callable[[Any], "Scalar | None"]
"""Returns the scalar that a value stands for, or None."""


@dataclass(frozen=True)
class Scalar:
    """The sum of a call's terms and of constants."""

    terms: tuple[Term, ...]
    others: tuple[Constant, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether it is a multiple of one known loss."""
        return len(self.terms) == 1 and self.terms[0].known is not None

    @property
    def constants(self) -> list[torch.Tensor]:
        """The tensors among the constants."""
        return [other for other in self.others if isinstance(other, torch.Tensor)]

    def and_others(self, value: torch.Tensor) -> torch.Tensor:
        """Add the constants to `value`, the value of the terms."""
        for other in self.others:
            value = value + other
        return value

    def plus(self, other: Scalar) -> Scalar:
        """Return the sum of both."""
        return Scalar((*self.terms, *other.terms), (*self.others, *other.others))

    def times(self, factor: float) -> Scalar:
        """Return the product with a number."""
        if factor == 1:
            return self
        return Scalar(tuple(t.times(factor) for t in self.terms), tuple(other * factor for other in self.others))

    def over(self, divisor: torch.Tensor) -> Scalar:
        """Return the quotient by a tensor."""
        return Scalar(tuple(t.over(divisor) for t in self.terms), tuple(other / divisor for other in self.others))


def combined(func: Any, args: Sequence[Any], kwargs: dict[str, Any], scalar_of: ScalarOf) -> Scalar | None:
    """Return the scalar of a sum, difference or multiple of scalars; None for any other operation."""
    if kwargs:
        return None
    if func in _NEGATING and len(args) == 1:
        found = scalar_of(args[0])
        return None if found is None else found.times(-1.0)
    if len(args) != 2:
        return None
    if func in _ADDING:
        return _sum(args[0], args[1], 1.0, scalar_of)
    if func in _SUBTRACTING:
        return _sum(args[0], args[1], -1.0, scalar_of)
    if func in _SUBTRACTING_FROM:
        return _sum(args[1], args[0], -1.0, scalar_of)
    return _scaled(func, args[0], args[1], scalar_of)


def _sum(first: Any, second: Any, factor: float, scalar_of: ScalarOf) -> Scalar | None:
    added, adding = _as_scalar(first, scalar_of), _as_scalar(second, scalar_of)
    return None if added is None or adding is None else added.plus(adding.times(factor))


def _scaled(func: Any, first: Any, second: Any, scalar_of: ScalarOf) -> Scalar | None:
    ours = scalar_of(first)
    if ours is None:  # number times scalar, in this order
        return _scaled(func, second, first, scalar_of) if func in _MULTIPLYING and scalar_of(second) is not None else None
    if scalar_of(second) is not None:
        return None
    if isinstance(second, torch.Tensor):
        plain = second.dim() == 0 and not second.requires_grad
        return ours.over(second) if func in _DIVIDING and plain else None
    if not isinstance(second, (int, float)):
        return None
    if func in _MULTIPLYING:
        return ours.times(float(second))
    return ours.times(1 / second) if func in _DIVIDING and second else None


def _as_scalar(value: Any, scalar_of: ScalarOf) -> Scalar | None:
    found = scalar_of(value)
    if found is not None:
        return found
    if isinstance(value, (int, float)):
        return Scalar((), () if value == 0 else (value,))
    return Scalar((), (value,)) if isinstance(value, torch.Tensor) and value.dim() == 0 else None


_NEGATING = frozenset(named("neg", "negative", "__neg__"))
_ADDING = frozenset(named("add", "__add__", "__radd__"))
_SUBTRACTING = frozenset(named("sub", "subtract", "__sub__"))
_SUBTRACTING_FROM = frozenset(named("rsub", "__rsub__"))
_MULTIPLYING = frozenset(named("mul", "multiply", "__mul__", "__rmul__"))
_DIVIDING = frozenset(named("div", "divide", "true_divide", "__div__", "__truediv__"))
OUT_OF_PLACE = {
    function: getattr(torch.Tensor, plain)
    for plain, writing in {
        "add": ("add_", "__iadd__"), "sub": ("sub_", "subtract_", "__isub__"), "mul": ("mul_", "multiply_", "__imul__"),
        "div": ("div_", "divide_", "true_divide_", "__itruediv__", "__idiv__"), "neg": ("neg_", "negative_"),
    }.items()
    for function in named(*writing)
}  # fmt: skip
"""Maps functions that write into their first argument to their out-of-place versions."""
