"""Finds and proves on a few samples how micro-batches compose the state that a forward changes (its side effects).

A forward may count, update a running mean, append to a list or keep its last output: on the model, on a loss module, in a
closure, in a global. A whole batch and unequal parts of it show the rule by which parts leave the same state as the whole.
State that is right when parts run in turn (a queue of samples) needs no rule. State without a rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from numbers import Rational
from typing import Any, TypeVar

import torch

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
    LONG,
    MISSING,
    AttributePlace,
    ContentsPlace,
    ItemPlace,
    Place,
    TensorPlace,
    VariablePlace,
)
from memfit.equivalence.same_values import as_tensor, difference_of, same
from memfit.equivalence.seen_effects import (
    SeenEffects,
    Trial,
    after,
    decides_once_moved,
    from_other_values,
    is_trained,
    places_of,
    seen_of,
)
from memfit.equivalence.tolerances import Deviation
from memfit.tracing.sandbox import Traces

T = TypeVar("T")


@dataclass(frozen=True)
class Moves:
    """The state that a whole batch changes, and how parts compose it."""

    composition: Composition
    deviation: Deviation | None
    """The first place without a rule."""
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
        """Returns (these moves, what parts give once more, now that the state has changed, but for counters: a forward may do
        something else at the next count). Nothing, if no state is composed or it has another structure now, for which the next
        call is proven."""
        try:
            self.composition.recount()
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


def composition_of(
    trial: Trial,
    doubles: Iterable[Trial],
    aside: Callable[[], AbstractContextManager[Traces]],
    allowed: Sequence[str] = (),
    *,
    graphs: bool = False,
    draws: bool = False,
) -> Moves:
    """Finds how parts compose the state that a whole batch changes. `aside` gives contexts that leave no trace.
    `allowed` names state that may stay uncomposed. `doubles`: trials on the samples of each part twice, where rules that hold
    for whole and parts by chance fail: all of them are run if parts differ in what they change or leave empty. `graphs`:
    tensors with a graph are state too; else they join like outputs (`side_outputs.py`). `draws`: whether the whole drew random
    numbers."""
    seen = [seen_of(trial, aside, graphs)]
    for double in doubles:
        seen.append(seen_of(double, aside, graphs))
        if not seen[0].is_uneven:
            break
    shown = seen
    moved = places_of(shown)
    still = [place for key, place in moved.items() if all(same(*each.ends(key), EXACT) for each in seen)]
    elsewhere = from_other_values(still, list(shown[0].whole.values()), trial, aside, graphs)
    if elsewhere is not None:
        seen, moved = [*seen, elsewhere], {**places_of([elsewhere]), **moved}
    slots, named = [], None
    for key, place in moved.items():
        flag = any(isinstance(each.before(key), (bool, str)) for each in seen)
        if all(same(*each.ends(key), EXACT) for each in seen) and not flag:
            # (A flag may mark what only the first forward does, which only the first micro-batch would do.)
            if _is_same_in_all(place, seen) or (elsewhere is not None and _may_matter(key, shown, elsewhere)):
                slots.append(ComposedPlace(place, Last()))  # (checked in every pass)
            continue
        nearly = all(same(*each.ends(key)) for each in seen)
        rule = next(_rules(place, key, seen, EXACT), None) or (None if nearly else next(_rules(place, key, seen), None))
        if isinstance(rule, (Added, SumOfParts)) and _is_nothing(seen[0].before(key)) and seen[0].moves(key):
            rule = _told_apart(place, key, rule, trial, seen[0], aside)
        if rule is not None:
            slots.append(ComposedPlace(place, rule))
        elif not nearly and place.label not in allowed and named is None:
            named = Deviation(place.label, max(difference_of(*each.ends(key)) for each in seen), 0.0, by="moving")
    kept = [place for place in moved.values() if not _is_idle(place, shown, elsewhere)]
    slots += _decided(slots, kept, seen)
    doubted = next((place for place in kept if place.label not in allowed), None)
    if named is None and doubted is not None and any(each.by_position for each in shown) and decides_once_moved(trial, aside):
        named = Deviation(doubted.label, 1.0, 0.0, by="moving")
    reset = {slot.place.key for slot in slots}
    steady = frozenset(place.key for place in kept if shown[0].all_move(place.key, reset=place.key in reset))
    return Moves(Composition(slots, kept, draws=draws, steady=steady), named)


def _is_same_in_all(place: Place, seen: Sequence[SeenEffects]) -> bool:
    """Whether all parts leave the whole's value. What is written in place is right where parts run in turn."""
    if not isinstance(place, (ItemPlace, AttributePlace, VariablePlace)):
        return False
    return all(_is_compared(each.ends(place.key)[0]) and each.obeys(place.key, Last(), EXACT) for each in seen)


def _decided(slots: Sequence[ComposedPlace], kept: Sequence[Place], seen: Sequence[SeenEffects]) -> list[ComposedPlace]:
    """Return slots for tensors that all parts leave alike: a counter decides when they are written, and is put back for each
    micro-batch."""
    if not any(isinstance(slot.rule, Last) for slot in slots):
        return []
    known = {slot.place.key for slot in slots}
    more = [place for place in kept if isinstance(place, TensorPlace) and place.key not in known and not is_trained(place)]
    alike = [place for place in more if all(each.leaves(place.key, each.ends(place.key)[0]) for each in seen)]
    return [ComposedPlace(place, Last()) for place in alike]


def _is_compared(value: Any) -> bool:
    """Whether it is compared over micro-batches, where it is the same in all parts (`Composition`)."""
    if isinstance(value, (list, tuple, dict)):
        return len(value) <= LONG
    small = isinstance(value, torch.Tensor) and value.numel() <= ENTRIES
    return small or value is None or isinstance(value, (float, int, str))


def _may_matter(key: tuple[Any, ...], shown: Sequence[SeenEffects], elsewhere: SeenEffects) -> bool:
    """Whether state that samples did not move would be moved by others, for later micro-batches to read: a largest value."""
    if any(not each.leaves(key, each.before(key)) for each in shown):
        return False
    return not elsewhere.leaves(key, elsewhere.ends(key)[0]) and not same(*elsewhere.returns, EXACT)


def _is_idle(place: Place, shown: Sequence[SeenEffects], elsewhere: SeenEffects | None) -> bool:
    """Whether a tensor is written without effect: neither its values nor the samples matter to what is left (a mask that every
    forward fills)."""
    if not isinstance(place, TensorPlace) or is_trained(place):
        return False
    key = place.key
    found = elsewhere is None or any(elsewhere.leaves(key, value) for value in (elsewhere.before(key), shown[0].before(key)))
    return found and all(each.leaves(key, each.before(key)) for each in shown)


def _is_nothing(before: Any) -> bool:
    """Whether what is added to the value before and what replaces it come to the same."""
    before = as_tensor(before)
    if isinstance(before, torch.Tensor):
        return not before.is_meta and not bool(before.any())
    return not before if is_number(before) else before in (None, MISSING)


def _told_apart(
    place: Place,
    key: tuple[Any, ...],
    rule: Rule,
    trial: Trial,
    seen: SeenEffects,
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


def _rules(place: Place, key: tuple[Any, ...], seen: Sequence[SeenEffects], closely: float = 1.0) -> Iterator[Rule]:
    """Yield the rules that hold in all trials."""
    first = next(each for each in seen if each.moves(key))
    wanted, before = first.ends(key)[0], first.before(key)
    parts = [after(part, key, before) for part in first.apart]
    for rule in _candidates_for(place, before, wanted, parts, first.sizes, closely):
        if all(each.obeys(key, rule, closely) for each in seen):
            yield rule


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
    before, whole, *parts = map(as_tensor, (before, whole, *parts))
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
    elif type(whole) in (list, tuple) and all(type(part) is type(whole) for part in parts):
        if len(whole) == sum(map(len, parts)):
            yield Rows(0)


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
