"""Finds and proves on a few samples how micro-batches compose the state that a forward changes (its side effects).

A forward may count, update a running mean, append to a list or keep its last output: on the model, on a loss module, in a
closure, in a global. A whole batch and unequal parts of it show the rule by which parts leave the same state as the whole.
State that is right when parts run in turn (a queue of samples) needs no rule. State without a rule is refused.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from numbers import Rational
from typing import Any, TypeVar

import torch

from memfit.batches.pieces import bounds
from memfit.batches.tree import tensors
from memfit.capture.size_dependence import Positions, decides_by_position
from memfit.engine.batch_dependent import ENTRIES, BatchDependent
from memfit.engine.compose_state import (
    Added,
    Appended,
    ComposedPlace,
    Composition,
    Inside,
    Last,
    Mean,
    Rows,
    Rule,
    SumOfParts,
    appended,
    is_number,
    items_of,
)
from memfit.engine.places import (
    MISSING,
    AttributePlace,
    ContentsPlace,
    ItemPlace,
    Place,
    VariablePlace,
    WithoutGraph,
    without_graph,
)
from memfit.engine.rewindable import IteratorPosition
from memfit.equivalence.tolerances import Deviation, relative_difference, tolerance
from memfit.tracing.sandbox import Traces

T = TypeVar("T")
Run = Callable[[int, int], object]
"""Runs the samples `start:stop` with the whole batch's random draws."""
Values = dict[tuple[Any, ...], tuple[Place, Any, Any]]
"""Maps a place's key to (place, value before, value after)."""


@dataclass(frozen=True)
class Moves:
    """The state that a whole batch changes, and how parts compose it."""

    composition: Composition
    deviation: Deviation | None
    """The first place without a rule."""
    again: tuple[list[Any], list[list[Any]]] | None = None
    """If state is composed: what the whole and the parts return in a second run, from the state left by the first."""
    decides: str | None = None
    """The source line whose control flow depends on values that it reads from the batch."""

    @property
    def mixes(self) -> list[ComposedPlace]:
        """The places where micro-batches leave otherwise than the whole batch, before they are joined."""
        return [slot for slot in self.composition.slots if not isinstance(slot.rule, Last)]

    def unless(self, same_alone: Callable[[], bool], aside: Callable[[], AbstractContextManager[Any]]) -> Moves:
        """Returns these moves, with a deviation unless the last part gives the same alone as after the others. Parts in turn
        may equal the whole by chance: a maximum that is among the first samples."""
        if self.deviation is not None:
            return self
        with aside():
            return self if same_alone() else replace(self, deviation=self.misread())

    def repeated(self, in_parts: Callable[[], list[T]]) -> tuple[Moves, list[T]]:
        """Returns (these moves, what parts give once more, now that the state has changed). Nothing, if no state is composed or
        it has another structure now, for which the next call is proven."""
        try:
            return self, in_parts() if self.composition.slots else []
        except (IndexError, KeyError):
            return self, []
        except BatchDependent:
            return replace(self, deviation=self.deviation or self.misread()), []

    def misread(self) -> Deviation:
        """Returns the deviation for state that a later forward, or a later part, reads differently in parts than as a whole."""
        places = [slot.place for slot in self.mixes or self.composition.slots] or self.composition.moved
        return Deviation(places[0].label, 1.0, 0.0, by="moving")


EXACT = 1e-5
"""Fraction of a proof's tolerance at which state is compared first. State that moves a little with every forward (a power
iteration that has converged) stays close to its old value."""
STILL = Moves(Composition(), None)
SOME = 3
"""A number that a forward is tried on to see whether it adds to what was there."""


@dataclass(frozen=True)
class Trial:
    """Samples to find rules on."""

    run: Run
    sizes: Sequence[int]
    """Number of samples in each part."""


@dataclass(frozen=True)
class _SeenEffects:
    """What one trial changed: by the whole, by its parts in turn, and by each part alone."""

    whole: Values
    in_turn: Values
    apart: list[Values]
    sizes: Sequence[int]
    by_position: bool

    def before(self, key: tuple[Any, ...]) -> Any:
        found = self.whole.get(key) or self.in_turn.get(key)
        return MISSING if found is None else found[1]

    def ends(self, key: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return what the whole leaves, and what the parts leave when they run in turn."""
        return _after(self.whole, key, self.before(key)), _after(self.in_turn, key, self.before(key))

    def obeys(self, key: tuple[Any, ...], rule: Rule, closely: float) -> bool:
        """Whether this rule makes the whole's value from the parts' values."""
        wanted, before = self.ends(key)[0], self.before(key)
        parts = [_after(part, key, before) for part in self.apart]
        try:
            made = parts if isinstance(rule, Last) else [rule.joined(before, parts, self.sizes)]
            return all(same(wanted, value, closely) for value in made)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError):
            return False


def composition_of(
    trials: Sequence[Trial],
    aside: Callable[[], AbstractContextManager[Traces]],
    allowed: Sequence[str] = (),
    *,
    graphs: bool = False,
    draws: bool = False,
) -> Moves:
    """Finds how parts compose the state that a whole batch changes. `aside` gives contexts that leave no trace.
    `allowed` names state that may stay uncomposed. One trial should repeat the same samples twice, where a rule that holds by
    chance on some samples fails. `graphs`: tensors with a graph are state too; else they join like outputs (`side_outputs.py`).
    `draws`: whether the whole drew random numbers."""
    seen = [_seen(trial, aside, graphs) for trial in trials]
    moved = {key: found[0] for each in reversed(seen) for key, found in {**each.in_turn, **each.whole}.items()}
    slots, named = [], None
    for key, place in moved.items():
        flag = any(isinstance(each.before(key), (bool, str)) for each in seen)
        if all(same(*each.ends(key), EXACT) for each in seen) and not flag:
            # (A flag may mark what only the first forward does, which only the first micro-batch would do.)
            assigned = isinstance(place, (ItemPlace, AttributePlace, VariablePlace))  # what is written in place is so in turn
            if assigned and all(_is_compared(each.ends(key)[0]) and each.obeys(key, Last(), EXACT) for each in seen):
                slots.append(ComposedPlace(place, Last()))
            continue
        nearly = all(same(*each.ends(key)) for each in seen)
        rule = next(_rules(place, key, seen, EXACT), None) or (None if nearly else next(_rules(place, key, seen), None))
        if isinstance(rule, (Added, SumOfParts)) and _is_nothing(seen[0].before(key)):
            rule = _told_apart(place, key, rule, trials[0], seen[0], aside)
        if rule is not None:
            slots.append(ComposedPlace(place, rule))
        elif not nearly and place.label not in allowed and named is None:
            named = Deviation(place.label, max(_difference(*each.ends(key)) for each in seen), 0.0, by="moving")
    if named is None and any(each.by_position for each in seen):
        named = next((Deviation(p.label, 1.0, 0.0, by="moving") for p in moved.values() if p.label not in allowed), None)
    return Moves(Composition(slots, list(moved.values()), draws=draws), named)


def _is_compared(value: Any) -> bool:
    """Whether it is compared over micro-batches, where it is the same in all parts (`Composition`)."""
    return isinstance(value, (float, int, str)) or (isinstance(value, torch.Tensor) and value.numel() <= ENTRIES)


def _seen(trial: Trial, aside: Callable[[], AbstractContextManager[Traces]], graphs: bool) -> _SeenEffects:
    looks: list[tuple[int, Positions]] = []

    def watched(start: int, stop: int) -> None:
        looks.append((stop - start, Positions()))
        with looks[-1][1].watching():
            trial.run(start, stop)

    pieces = list(bounds(trial.sizes))
    whole = _values(watched, [(0, sum(trial.sizes))], aside, graphs)
    in_turn = _values(trial.run, pieces, aside, graphs)
    apart = [_values(watched, [piece], aside, graphs) for piece in pieces]
    return _SeenEffects(whole, in_turn, apart, trial.sizes, decides_by_position(looks))


def _is_nothing(before: Any) -> bool:
    """Whether what is added to the value before and what replaces it come to the same."""
    before = _as_tensor(before)
    if isinstance(before, torch.Tensor):
        return not before.is_meta and not bool(before.any())
    return not before if is_number(before) else before in (None, MISSING)


def _told_apart(
    place: Place,
    key: tuple[Any, ...],
    rule: Rule,
    trial: Trial,
    seen: _SeenEffects,
    aside: Callable[[], AbstractContextManager[Traces]],
) -> Rule:
    """Return `Added` or `SumOfParts`: what a whole batch leaves where a number was before tells them apart."""
    whole = seen.ends(key)[0]
    with aside():
        some = torch.full_like(whole, SOME) if isinstance(whole, torch.Tensor) else type(whole)(SOME)
        try:
            place.put(some)
            trial.run(0, sum(trial.sizes))
        except Exception:  # a forward that cannot go on from there
            return rule
        found = place.value()
    return SumOfParts() if same(found, whole) else Added() if same(found, whole + some) else rule


def _rules(place: Place, key: tuple[Any, ...], seen: Sequence[_SeenEffects], closely: float = 1.0) -> Iterator[Rule]:
    """Yield the rules that hold in all trials."""
    first = seen[0]
    wanted, before = first.ends(key)[0], first.before(key)
    parts = [_after(part, key, before) for part in first.apart]
    for rule in _candidates_for(place, before, wanted, parts, first.sizes, closely):
        if all(each.obeys(key, rule, closely) for each in seen):
            yield rule


def _after(values: Values, key: tuple[Any, ...], before: Any) -> Any:
    """Return a place's value after the run, or its old value if it did not change."""
    return values[key][2] if key in values else before


def _values(
    run: Run, pieces: Sequence[tuple[int, int]], aside: Callable[[], AbstractContextManager[Traces]], graphs: bool
) -> Values:
    """Return what runs over these pieces, in turn, change."""
    found: Values = {}
    with aside() as traces:
        for start, stop in pieces:
            run(start, stop)
        for key, (place, before) in traces.moved().items():
            after = place.value()
            if not any(tensor.requires_grad for tensor in tensors(after)):
                found[key] = place, before, after
            elif graphs:
                found[key] = WithoutGraph(place), without_graph(before), without_graph(after)
    return found


def _candidates_for(
    place: Place, before: Any, whole: Any, parts: Sequence[Any], sizes: Sequence[int], closely: float
) -> Iterator[Rule]:
    if not isinstance(place, ContentsPlace):
        if type(before) is type(whole) and type(before) in (list, tuple) and len(before) < len(whole):  # by a longer one
            yield from _appending(before, whole, parts, sizes, closely)
        yield from _candidates(before, whole, parts)
        inside = _inside(whole, parts, sizes, closely)
        yield from () if inside is None else (inside,)
        return
    yield from _appending(before, whole, parts, sizes, closely)


def _appending(before: Any, whole: Any, parts: Sequence[Any], sizes: Sequence[int], closely: float) -> Iterator[Rule]:
    _, added = appended(before, whole)
    by_part = [appended(before, part)[1] for part in parts]
    if all(len(found) == len(added) for found in by_part):
        rules = [rule_of(MISSING, item, [found[i] for found in by_part], sizes, closely) for i, item in enumerate(added)]
        if None not in rules:
            yield Appended(tuple(rule for rule in rules if rule is not None))


def rule_of(
    before: Any, whole: Any, parts: Sequence[Any], sizes: Sequence[int], closely: float = 1.0
) -> Rule | None:
    """Returns the rule that makes the whole's value from the parts' values, or None. `closely`: fraction of the usual rounding
    tolerance that is allowed."""
    for rule in _candidates(before, whole, parts):
        try:
            alike = parts if isinstance(rule, Last) else [rule.joined(before, parts, sizes)]
            if all(same(whole, made, closely) for made in alike):
                return rule
        except (RuntimeError, TypeError, ValueError):
            continue
    return _inside(whole, parts, sizes, closely)


def _candidates(before: Any, whole: Any, parts: Sequence[Any]) -> Iterator[Rule]:
    yield Last()
    before, whole, *parts = map(_as_tensor, (before, whole, *parts))
    if isinstance(whole, torch.Tensor):
        alike = all(isinstance(part, torch.Tensor) and part.shape == whole.shape for part in parts)
        if alike and whole.is_floating_point():
            yield Mean()
        if alike and isinstance(before, torch.Tensor) and before.shape == whole.shape and whole.dtype is not torch.bool:
            yield Added()
        if alike and whole.dtype is not torch.bool:
            yield SumOfParts()
        if all(isinstance(part, torch.Tensor) and part.dim() == whole.dim() for part in parts):
            yield from (Rows(dim) for dim in range(whole.dim()))
    elif is_number(whole) and all(map(is_number, parts)):
        if not isinstance(whole, Rational):
            yield Mean()
        if is_number(before):
            yield Added()
        yield SumOfParts()


def _inside(whole: Any, parts: Sequence[Any], sizes: Sequence[int], closely: float) -> Rule | None:
    items, by_part = items_of(whole), [items_of(part) for part in parts]
    if items is None or any(type(part) is not type(whole) or len(its) != len(items) for part, its in zip(parts, by_part)):
        return None
    keys = list(items) if isinstance(items, dict) else range(len(items))
    try:
        rules = {key: rule_of(MISSING, items[key], [its[key] for its in by_part], sizes, closely) for key in keys}
    except (KeyError, RecursionError):
        return None
    return None if None in rules.values() else Inside({key: rule for key, rule in rules.items() if rule is not None})


def _rounding(number: Any) -> float:
    """Return the rounding tolerance for such numbers: double precision for Python's, their own dtype for NumPy's."""
    return tolerance(getattr(torch, str(getattr(number, "dtype", "float64")), torch.float32))


def _as_tensor(value: Any) -> Any:
    """Return a tensor over a NumPy array's memory; return anything else unchanged."""
    return torch.from_numpy(value) if type(value).__name__ == "ndarray" and value.dtype.kind in "fciub" else value


def same(a: Any, b: Any, closely: float = 1.0) -> bool:
    """Whether two values are equal up to rounding. Objects of one type that cannot be compared count as equal."""
    if a is b:
        return True
    a, b = _as_tensor(a), _as_tensor(b)
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


def _difference(a: Any, b: Any) -> float:
    a, b = _as_tensor(a), _as_tensor(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point():
        return relative_difference(a, b)
    return float(abs(a - b) / max(abs(a), abs(b))) if is_number(a) and is_number(b) and a != b else 1.0
