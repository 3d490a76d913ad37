"""What a forward asks of its numbers: how it compares them, and what it computes on the way there. A counter has another value
at every call; the forward does something else only if an answer is another one (`self.steps > 1000`, `self.steps % 10 == 0`).

Numbers take notes while the forward runs once. Not covered: what they are used for besides comparisons (as an index), and what
is computed outside of Python's operators (`math.log`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from memfit.engine.places import Place

MOST = 64
"""Questions of one number. A forward that asks more compares it with something that changes itself."""
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_UNARY = ("neg", "pos", "abs", "invert")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_WHOLE = {"int": int, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "round": round}
"""What makes stages of a number (`int(step / 100)`). What it gives counts as an answer."""


class Operation(NamedTuple):
    """An operation on a number."""

    function: Callable[..., Any]
    others: tuple[Any, ...]
    """The other operands: none or one."""
    right: bool = False
    """Whether the number is the right operand."""

    def of(self, value: Any) -> Any:
        return self.function(*self.others, value) if self.right else self.function(value, *self.others)


Question = tuple[Operation, ...]
"""What leads from a number to an answer. (None: the answer is the number itself.)"""
Questions = tuple[Question, ...]
Notes = dict[Question, None]
"""Questions in the order in which they were asked."""


def is_asked_of(value: Any) -> bool:
    """Whether a value is a number that can take notes, or a flag, which is its own answer."""
    return type(value_of(value)) in (int, float, bool)


def value_of(value: Any) -> Any:
    """Return the number in a scalar of NumPy, or in a tensor or an array of one entry on the host; anything else as it is."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad
        return value.item() if plain and value.layout is torch.strided else value
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1 else value


def answers_of(value: Any, questions: Questions) -> tuple[Any, ...]:
    """Return the answers that this number gives."""
    value = value_of(value)
    return tuple(_answer(value, question) for question in questions) if is_asked_of(value) else ()


def _answer(value: Any, question: Question) -> Any:
    try:
        for step in question:
            value = step.of(value)
    except (ArithmeticError, TypeError, ValueError):
        return None
    return value


@contextmanager
def noting(places: Mapping[Hashable, Place]) -> Iterator[dict[Hashable, Notes]]:
    """Context in which the numbers at these places take notes of what they are asked."""
    found: dict[Hashable, Notes] = {}
    with ExitStack() as stack:
        for key, place in places.items():
            value = place.value()
            if type(value) is bool:
                found[key] = {(): None}
            elif is_asked_of(value) and getattr(value, "shape", ()) == () and not isinstance(value, torch.Tensor):
                found[key] = {}
                stack.callback(place.put, value)
                place.put(asked(value_of(value), found[key], ()))
        yield found


class Expected:
    """The answers of numbers at a call, which other forwards may move before it runs."""

    def __init__(self, places: Mapping[Hashable, Place], questions: Mapping[Hashable, Questions]) -> None:
        self._expected = [(place, questions[key], answers_of(place.value(), questions[key])) for key, place in places.items()]

    def changed(self) -> str | None:
        """Return the name of a number that gives another answer now; None if none does."""
        found = (place.label for place, asked, answers in self._expected if answers_of(place.value(), asked) != answers)
        return next(found, None)


def questions_of(notes: Notes) -> Questions:
    """Return what was asked; nothing if it was too much to tell something."""
    return tuple(notes) if len(notes) <= MOST else ()


def asked(value: Any, notes: Notes, question: Question) -> Any:
    """Return a number that takes notes, if it is one. `question`: how it was computed."""
    value = value if isinstance(value, torch.Tensor) else value_of(value)
    kind = {int: _AskedInt, float: _AskedFloat}.get(type(value))
    if kind is None:
        return value
    made = kind(value)
    made.notes, made.question = notes, question
    return made


def _plain(value: Any) -> Any:
    """Return the number without notes."""
    return getattr(value, "plain", lambda: value)() if isinstance(value, (_AskedInt, _AskedFloat)) else value


def _operator(function: Callable[..., Any], *, right: bool = False, compares: bool = False) -> Callable[..., Any]:
    """Return the method for an operator. What it returns takes notes, too, or has been noted."""

    def method(self: Any, *others: Any) -> Any:
        plain = tuple(map(_plain, others))
        found = Operation(function, plain, right).of(_plain(self))
        step = Operation(function, tuple(map(value_of, plain)), right)
        if not all(map(is_asked_of, step.others)):
            return found
        if compares:
            self.notes[(*self.question, step)] = None
            return found
        return asked(found, self.notes, (*self.question, step))

    return method


def _operators(kind: type) -> dict[str, Any]:
    """Return the methods of a number that takes notes."""
    found = {"plain": getattr(kind, f"__{kind.__name__}__"), "__hash__": kind.__hash__, "notes": {}, "question": ()}
    for name in _ARITHMETIC:
        function, short = pow if name == "pow" else getattr(operator, name), name.rstrip("_")
        if hasattr(kind, f"__{short}__"):
            found |= {f"__{short}__": _operator(function), f"__r{short}__": _operator(function, right=True)}
    for name in _UNARY:
        if hasattr(kind, f"__{name}__"):
            found[f"__{name}__"] = _operator(getattr(operator, name))
    for name in _COMPARISONS:
        found[f"__{name}__"] = _operator(getattr(operator, name), compares=True)
    if hasattr(kind, "__divmod__"):
        found["__divmod__"] = lambda self, other: (self // other, self % other)
    found |= {f"__{name}__": _operator(function, compares=True) for name, function in _WHOLE.items()}
    return found | {"__bool__": _operator(operator.truth, compares=True)}


_AskedInt = type("_AskedInt", (int,), _operators(int))
_AskedFloat = type("_AskedFloat", (float,), _operators(float))
