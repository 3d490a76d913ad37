"""Builds the dataclasses of a plan from JSON, validated field by field by their types. Nothing is unpickled."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from memfit._errors import PlanFileError
from memfit._units import is_readable
from memfit.planning.sharding import LEVELS

MOST_SAMPLES = 1 << 40
"""Largest count accepted from a plan file; a larger one means that the file is damaged."""
_COUNTS = ("share", "micro_batch", "accumulation", "target_batch")
_ABOVE_ZERO = (*_COUNTS, "by_size", "size_peaks")
_NOT_BELOW_ZERO = ("limit", "margin", "held", "peak", "upper", "seconds", "median", "keep", "checkpoint", "rank", "overhead")
_CHOICES = {
    "mode": ("whole", "accumulate", "replay"),
    "precision": ("off", "float32", "bfloat16", "float16"),
    "shard": LEVELS,
    "offload": ("off",),
    "accumulate_in": ("float32", "param"),
}


class _Wrong(Exception):
    """A value is not one of its field."""


def built(kind: Any, data: Any, source: str) -> Any:
    """Return a dataclass of this kind with these values of JSON. Raises PlanFileError."""
    if not isinstance(data, dict):
        raise unreadable(source, f"where a {kind.__name__} belongs, there is {data!r}")
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(known))
    missing = sorted(n for n, f in known.items() if n not in data and _required(f))
    if unknown or missing:
        what = f"unknown field {unknown[0]!r}" if unknown else f"field {missing[0]!r} is missing"
        raise unreadable(source, what)
    hints, values = _hints(kind), {}
    for name, value in data.items():
        try:
            values[name] = _value(name, hints[name], value, source)
        except _Wrong:
            raise unreadable(source, f"the field {name!r} is {value!r}") from None
    return kind(**values)


def unreadable(source: Any, what: str) -> PlanFileError:
    """Return the error for a file that is no plan."""
    return PlanFileError(
        f"reading the plan {source}", found=what, next_move="save one with plan.save(path), or plan again"
    )


_hints = cache(get_type_hints)


def _required(f: Any) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _value(name: str, wanted: Any, value: Any, source: str) -> Any:
    """Return this value as the type that a field or an entry of it has. Raises _Wrong."""
    if dataclasses.is_dataclass(wanted):
        return built(wanted, value, source)
    if get_origin(wanted) is tuple:
        return _entries(name, get_args(wanted), value, source)
    if get_origin(wanted) is types.UnionType:  # X | None
        return None if value is None else _value(name, get_args(wanted)[0], value, source)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and not is_readable(value):
        raise unreadable(source, f"the field {name!r} is not a plausible number")
    if wanted is float and is_number:
        value = float(value)
    if type(value) is not wanted or value not in _CHOICES.get(name, (value,)):
        raise _Wrong
    if is_number and (value < 0 if name in _NOT_BELOW_ZERO else value < 1 if name in _ABOVE_ZERO else False):
        raise _Wrong
    if name in _COUNTS and value > MOST_SAMPLES:
        raise _Wrong
    return value


def _entries(name: str, kinds: Sequence[Any], value: Any, source: str) -> tuple[Any, ...]:
    """Return a tuple of these kinds, or of any number of the first kind if an ellipsis follows it. Raises _Wrong."""
    each = [kinds[0]] * len(value) if isinstance(value, list) and kinds[-1] is Ellipsis else kinds
    if not isinstance(value, list) or len(value) != len(each):
        raise _Wrong
    found = tuple(_value(name, kind, entry, source) for kind, entry in zip(each, value))
    ranks = [entry.rank for entry in found if hasattr(entry, "rank")]
    if ranks != sorted(set(ranks)):
        raise _Wrong
    return found
