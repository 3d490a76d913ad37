"""State that a forward moves: how micro-batches compose it, found and proven on few samples.

A forward may count, keep a running centre, append to a list, remember its last output: on the model, on a loss module, in a
closure, in a global. On a whole and on unequal parts of it a rule is looked for by which parts leave what the whole leaves.
State that moves rightly when parts run one after the other (a queue of samples) needs none. What has no rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.batches.pieces import bounds
from memfit.batches.tree import tensors
from memfit.engine.composed import (
    MISSING,
    Added,
    Appended,
    Composition,
    Contents,
    Inside,
    Last,
    Mean,
    Place,
    Rows,
    Rule,
    Slot,
    appended,
)
from memfit.profiling.sandbox import Traces
from memfit.training.comparing import Deviation, relative_difference, tolerance

Run = Callable[[int, int], object]
"""Runs the samples `start:stop`, with the draws of the whole."""
Values = dict[tuple[Any, ...], tuple[Place, Any, Any]]
"""(place, value before, value after) by the places' keys."""


@dataclass(frozen=True)
class Moves:
    """What a whole moves, and how parts compose it."""

    composition: Composition
    deviation: Deviation | None
    """The first place that has no rule."""


STILL = Moves(Composition(), None)


def composition_of(
    run: Run, sizes: Sequence[int], aside: Callable[[], AbstractContextManager[Traces]], allowed: Sequence[str] = ()
) -> Moves:
    """How parts of these sizes compose what the whole moves; `aside` gives contexts that leave no trace. `allowed` are
    names of state that may be composed as it comes."""
    whole = _values(run, [(0, sum(sizes))], aside)
    if len(sizes) < 2:
        return Moves(Composition((), [place for place, _, _ in whole.values()]), None)
    in_turn = _values(run, list(bounds(sizes)), aside)
    moved = {**in_turn, **whole}
    ends = {key: (_after(whole, key, before), _after(in_turn, key, before)) for key, (_, before, _) in moved.items()}
    wrong = [key for key, (wanted, made) in ends.items() if not same(wanted, made)]
    places = [place for place, _, _ in moved.values()]
    if not wrong:
        return Moves(Composition((), places), None)
    apart = [_values(run, [piece], aside) for piece in bounds(sizes)]
    slots, named = [], None
    for key in wrong:
        place, before, _ = moved[key]
        wanted, made = ends[key]
        rule = _rule_of_place(place, before, wanted, [_after(part, key, before) for part in apart], sizes)
        if rule is not None:
            slots.append(Slot(place, rule))
        elif place.label not in allowed and named is None:
            named = Deviation(place.label, _difference(wanted, made), 0.0, moves=True)
    return Moves(Composition(slots, places), named)


def _after(values: Values, key: tuple[Any, ...], before: Any) -> Any:
    """What a place holds afterwards; what it held before where it did not move."""
    return values[key][2] if key in values else before


def _values(run: Run, pieces: Sequence[tuple[int, int]], aside: Callable[[], AbstractContextManager[Traces]]) -> Values:
    """What runs over these pieces, one after the other, move."""
    with aside() as traces:
        for start, stop in pieces:
            run(start, stop)
        found = {key: (place, before, place.value()) for key, (place, before) in traces.moved().items()}
        return {key: value for key, value in found.items() if not _leads_on(value[2])}


def _leads_on(value: Any) -> bool:
    """Whether there is a tensor with a graph in it, which is joined as outputs are (`sidedoors.py`)."""
    return any(tensor.requires_grad for tensor in tensors(value))


def _rule_of_place(place: Place, before: Any, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> Rule | None:
    if not isinstance(place, Contents):
        return rule_of(before, whole, parts, sizes)
    added = appended(before, whole)
    by_part = [appended(before, part) for part in parts]
    if any(len(found) != len(added) for found in by_part):
        return None
    rules = [rule_of(MISSING, item, [found[i] for found in by_part], sizes) for i, item in enumerate(added)]
    return None if None in rules else Appended(tuple(rule for rule in rules if rule is not None))


def rule_of(before: Any, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> Rule | None:
    """The rule by which the values of parts make that of the whole; None where there is none."""
    for rule in _candidates(before, whole, parts):
        try:
            if same(whole, rule.joined(before, parts, sizes)) and (not isinstance(rule, Last) or _all_same(whole, parts)):
                return rule
        except (RuntimeError, TypeError, ValueError):
            continue
    return _inside(whole, parts, sizes)


def _candidates(before: Any, whole: Any, parts: Sequence[Any]) -> Iterator[Rule]:
    yield Last()
    if isinstance(whole, torch.Tensor):
        alike = all(isinstance(part, torch.Tensor) and part.shape == whole.shape for part in parts)
        if alike and whole.is_floating_point():
            yield Mean()
        if alike and isinstance(before, torch.Tensor) and before.shape == whole.shape and whole.dtype is not torch.bool:
            yield Added()
        if all(isinstance(part, torch.Tensor) and part.dim() == whole.dim() for part in parts):
            yield from (Rows(dim) for dim in range(whole.dim()))
    elif _is_number(whole) and all(map(_is_number, parts)):
        if isinstance(whole, float):
            yield Mean()
        if _is_number(before):
            yield Added()
        elif before is MISSING and isinstance(whole, int):
            yield _Total()


@dataclass(frozen=True)
class _Total:
    """Numbers of parts add up: the samples of a forward."""

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        return sum(values)


def _inside(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> Rule | None:
    if type(whole) not in (list, tuple, dict) or any(type(p) is not type(whole) or len(p) != len(whole) for p in parts):
        return None
    keys = list(whole) if isinstance(whole, dict) else range(len(whole))
    try:
        rules = {key: rule_of(MISSING, whole[key], [part[key] for part in parts], sizes) for key in keys}
    except KeyError:
        return None
    return None if None in rules.values() else Inside({key: rule for key, rule in rules.items() if rule is not None})


def _all_same(whole: Any, parts: Sequence[Any]) -> bool:
    return all(same(whole, part) for part in parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal but for rounding; objects that cannot be compared are taken to be."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if _is_number(a) and _is_number(b):
        return a == b or (isinstance(a, float) and abs(a - b) <= tolerance(torch.float64) * max(abs(a), abs(b)))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if a is MISSING or b is MISSING or isinstance(a, (str, bool, torch.Tensor)) or isinstance(b, (str, bool, torch.Tensor)):
        return type(a) is type(b) and bool(a == b)
    return type(a) is type(b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        return relative_difference(a, b) <= tolerance(a.dtype)
    return bool(torch.equal(a, b))


def _difference(a: Any, b: Any) -> float:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point():
        return relative_difference(a, b)
    return abs(a - b) / max(abs(a), abs(b)) if _is_number(a) and _is_number(b) and a != b else 1.0
