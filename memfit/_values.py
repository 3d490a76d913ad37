"""Validates single values from the user: counts, flags, choices, functions. Nothing here looks at the model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memfit._errors import UsageError
from memfit.levers.precision import PRECISIONS, parse_precision

MOST = 1 << 40
"""Larger than any sensible count."""
EXAMPLES = {"script_accumulation": 8, "micro_batch": 16, "steps": 3}
"""Example values for counts that are usually smaller than a batch."""
CALLED_WITH = {"loss_fn": ("model", "batch"), "before_step": (), "weight": ("batch",), "split": ("batch", "sizes")}
"""The arguments that memfit passes to each of the user's functions."""


def check_count(name: str, value: Any) -> None:
    """Raise UsageError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"{name}={value!r}",
            found=f"it is of type {type(value).__name__}",
            next_move=f"pass a whole number, for example {name}={_meant(name, value)}",
        )
    if value < 1:
        raise UsageError(f"{name}={value}", found="it has to be at least 1", next_move=_instead_of_none(name))
    if value >= MOST:
        raise UsageError(f"{name}={value}", found="no machine counts that many", next_move=_instead_of_none(name))


def check_flag(name: str, value: Any) -> None:
    """Raise UsageError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise UsageError(
            f"{name}={value!r}", found=f"it is of type {type(value).__name__}", next_move=f"pass {name}=True or {name}=False"
        )


def check_functions(**functions: Any) -> None:
    """Raise UsageError unless each function is None or accepts the arguments that memfit passes to it."""
    for name, value in functions.items():
        if value is not None:
            _check_function(name, value)


def micro_batch_from(value: Any) -> tuple[int | None, bool]:
    """Return (the prescribed micro-batch or None, whether the whole share was asked for). Raises UsageError."""
    if isinstance(value, str):
        if value not in ("auto", "off"):
            raise choice_of("micro_batch", value, ("auto", "off", "a whole number"))
        return None, value == "off"
    check_count("micro_batch", value)
    return value, False


def precision_from(value: Any) -> str:
    """Return a name that the precision lever knows. Raises UsageError."""
    if isinstance(value, str):
        return parse_precision(value)
    name = str(value).removeprefix("torch.")
    known = isinstance(value, torch.dtype) and name in PRECISIONS
    raise UsageError(
        f"precision={value!r}",
        found=f"it is of type {type(value).__name__}",
        next_move=f'pass its name, precision="{name}"' if known else f"pass a name: {', '.join(('auto', 'off', *PRECISIONS))}",
    )


def names_from(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of names as a tuple. Raises UsageError for anything else, such as a bare string."""
    if isinstance(value, str):
        raise UsageError(f"{name}={value!r}", found="it is one string", next_move=f"pass a list, {name}=[{value!r}]")
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(item, str) for item in value):
        raise UsageError(
            f"{name}={value!r}", found=f"it is of type {type(value).__name__}", next_move="pass a list of names"
        )
    return tuple(value)


def is_one_of(value: Any, allowed: Sequence[str]) -> bool:
    """Whether `value` is one of these strings. Arrays and tensors, which compare elementwise, are not."""
    return isinstance(value, str) and value in allowed


def choice_of(name: str, value: Any, allowed: Sequence[str]) -> UsageError:
    """Return the error for a value that is not among those allowed."""
    return UsageError(f"{name}={value!r}", found="memfit does not know it", next_move=f"use {', '.join(allowed)}")


def not_of_type(asked: str, value: Any, wanted: str) -> UsageError:
    """Return the error for a value of the wrong type. `wanted` describes the right one."""
    return UsageError(asked, found=f"it is of type {type(value).__name__}", next_move=f"pass {wanted}")


def _meant(name: str, value: Any) -> int:
    """Return the number to suggest: the integer written as a float or as text, else an example."""
    try:
        number = float(value) if isinstance(value, (float, str)) else 0.0
    except ValueError:
        number = 0.0
    return int(number) if number >= 1 and number.is_integer() else EXAMPLES.get(name, 256)


def _instead_of_none(name: str) -> str:
    if name == "script_accumulation":
        return "omit it, or pass as many iterations as your loop makes per optimizer.step(), script_accumulation=8 for 8"
    if name == "micro_batch":
        return 'omit it, or pass the samples per forward, for example micro_batch=16 ("off": the whole batch)'
    return f"pass, for example, {name}={EXAMPLES.get(name, 256)}"


def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        raise UsageError(
            f"{name}={_shown(value)}",
            found=f"it is of type {type(value).__name__}",
            next_move=f"pass a function: {_called(name)}",
        )
    if name == "loss_fn" and _is_criterion(value):
        raise UsageError(
            f"loss_fn={_shown(value)}",
            found="it takes outputs and targets, but memfit calls loss_fn(model, batch)",
            next_move="pass a function that runs the model too: lambda model, batch: criterion(model(batch[0]), batch[1])",
        )
    if not _takes(value, len(CALLED_WITH[name])):
        raise UsageError(
            f"{name}={_shown(value)}",
            found=f"it takes {inspect.signature(value)}, but memfit calls {_called(name)}",
            next_move=f"pass a function that can be called as {_called(name)}",
        )


def _is_criterion(value: Any) -> bool:
    return isinstance(value, nn.modules.loss._Loss) or getattr(value, "__module__", None) == torch.nn.functional.__name__


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # built-in functions may have no signature
        return True
    return True


def _called(name: str) -> str:
    return f"{name}({', '.join(CALLED_WITH[name])})"


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value).splitlines()[0][:60]
