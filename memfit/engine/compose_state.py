"""Side effects of a forward, composed over micro-batches to what one forward over the full batch would leave.

Each micro-batch starts with the state at the call. Afterwards the states that the micro-batches left are joined by a rule that
was proven with a full batch and unequal parts. Not covered: state outside the process, and state that did not change in the
proof but does later.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from memfit.engine.asked_numbers import Expected, value_of
from memfit.engine.batch_dependent import BatchDependent, check_same
from memfit.engine.call_context import is_faking
from memfit.engine.idle_places import IdlePlaces
from memfit.engine.place_marks import same_entries
from memfit.engine.places import MISSING, Place, TensorPlace, contents_of, refilled
from memfit.engine.unseen_moves import UnseenMoves
from memfit.engine.user_code import is_installed
from memfit.engine.version_checks import Keys


class Rule(Protocol):
    """How the values that parts leave give the value of the full batch."""

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        """The value after a full batch, given the value at the call and those after micro-batches of these sizes."""
        ...


@dataclass(frozen=True)
class Last:
    """Every part leaves the full batch's value: a counter of forwards."""

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        return values[-1]


@dataclass(frozen=True)
class Mean:
    """The mean over samples: a running center."""

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        total = sum(sizes)
        return sum(value * (size / total) for value, size in zip(values, sizes))


@dataclass(frozen=True)
class Added:
    """The sum of what the parts add: a count of samples. It begins at zero where there was no number."""

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        if not is_number(before) and not hasattr(before, "shape"):
            return sum(values)
        return before + sum(value - before for value in values)


@dataclass(frozen=True)
class SumOfParts:
    """The sum over the parts, whatever was there before: the samples of the last forward, its hits."""

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        return sum(values)


@dataclass(frozen=True)
class Rows:
    """Concatenation along a dimension: the outputs of the last forward. Lists and tuples have one."""

    dim: int

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.cat(list(values), self.dim)
        if isinstance(values[0], (list, tuple)):
            return type(values[0])(itertools.chain.from_iterable(values))
        import numpy as np

        return np.concatenate(list(values), self.dim)


@dataclass(frozen=True)
class Appended:
    """A list or a tuple to which every part appends as many items as the full batch, each joined by its own rule, and of which
    it drops as many. If a checkpoint of the script recomputes them, they are appended again."""

    rules: tuple[Rule, ...]

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        drops, made = zip(*(appended(before, value) for value in values))
        if len(set(drops)) > 1 or len(set(map(len, made))) > 1:
            raise ValueError("parts drop or append different numbers of items")
        rules = enumerate(itertools.islice(itertools.cycle(self.rules), len(made[0])))
        items = [*before[drops[0] :], *(rule.joined(MISSING, [m[i] for m in made], sizes) for i, rule in rules)]
        return tuple(items) if isinstance(values[0], tuple) else items


@dataclass(frozen=True)
class Inside:
    """A tuple, list, dictionary or object, item by item."""

    rules: Mapping[Any, Rule]

    def joined(self, before: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        items, first = [items_of(value) for value in values], values[0]
        made = {key: rule.joined(MISSING, [item[key] for item in items], sizes) for key, rule in self.rules.items()}
        if isinstance(first, dict):
            return {**first, **made}
        if isinstance(first, (list, tuple)):
            return getattr(type(first), "_make", type(first))(made[i] for i in range(len(first)))
        found = copy.copy(first)
        vars(found).update(made)
        return found


def items_of(value: Any) -> Any:
    """Return what a container or an object of the user's holds, by key, position or name; None if it is neither."""
    if isinstance(value, (list, tuple, dict)):
        return value
    own = isinstance(value, SimpleNamespace) or not (is_installed(type(value).__module__) or callable(value))
    return getattr(value, "__dict__", None) if own else None


def appended(before: Sequence[Any], after: Sequence[Any]) -> tuple[int, list[Any]]:
    """Return (how many of the first items were dropped, the items that were appended)."""
    for start in range(len(before) + 1):
        kept = before[start:]
        if len(kept) <= len(after) and all(a is b for a, b in zip(kept, after)):
            return start, list(after[len(kept) :])
    return len(before), list(after)


@dataclass(frozen=True)
class ComposedPlace:
    """A place and the rule that composes its value."""

    place: Place
    rule: Rule


_FILLED = (list, dict, deque)
_Value = tuple[Any, Any]
"""A value at a place, and its contents if it is a container: an attribute may be replaced by a part of the list that it was,
after items were appended to that."""


def _is_counted(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool) or value is MISSING


class Composition:
    """State over the micro-batches of one pass: `slots` are composed, `moved` are all places that a forward changes. `draws`:
    whether it draws random numbers, so that what parts leave alike in a proof may differ. `steady`: keys of the places that all
    parts of a proof moved."""

    def __init__(
        self,
        slots: Sequence[ComposedPlace] = (),
        moved: Sequence[Place] = (),
        *,
        draws: bool = False,
        steady: Keys = frozenset(),
    ) -> None:
        self.slots, self.moved, self.draws, self.steady = tuple(slots), tuple(moved), draws, steady
        self.expected: Expected | None = None
        self._there: list[_Value] | None = None
        self._held: set[Hashable] = set()
        self._before: list[_Value] = []
        self._after: list[list[Any]] = []
        self._sizes: list[int] = []
        self._idle = IdlePlaces()
        self._watch: Callable[[Keys, Keys], UnseenMoves] | None = None
        self._unseen: UnseenMoves | None = None

    @property
    def keys(self) -> Keys:
        """Keys of the places that change."""
        return frozenset(place.key for place in self.moved)

    @property
    def may_move(self) -> bool:
        """Whether a forward changes places, or may."""
        return bool(self.moved) or self._watch is not None

    @property
    def in_sequence(self) -> bool:
        """Whether the state depends on the order of samples: rows, items, and state that is right only if parts run in
        sequence."""
        any_order = {id(slot.place) for slot in self.slots if isinstance(slot.rule, (Last, Mean, Added, SumOfParts))}
        told = [place for place in self.moved if id(place) not in any_order]
        return any(isinstance(place, TensorPlace) or not _is_counted(place.value()) for place in told)

    @property
    def trained(self) -> list[TensorPlace]:
        """Trainable parameters that a forward writes."""
        return [place for place in self.moved if isinstance(place, TensorPlace) and place.tensor.requires_grad]

    def agrees_with(self, other: Composition) -> bool:
        """Whether the same places change, composed by the same rules."""
        mine, its = ({slot.place.key: slot.rule for slot in each.slots} for each in (self, other))
        return self.keys == other.keys and mine == its

    def is_elsewhere(self, held: Set[Hashable]) -> bool:
        """Whether something that held places before (a list, a dictionary, a tensor) is not there any more, as the script has
        replaced it, or was made by the forward before. `held`: where they were found at a call."""
        if self._held <= held:
            self._held |= held
            return False
        return True

    def afresh(self, watch: Callable[[Keys, Keys], UnseenMoves] | None = None) -> Composition:
        """A copy for another call, without the values of this one. `watch` begins to watch a pass for state that moves
        otherwise than a proof has seen, given the keys of the places that move, and of those that are steady; None: no proof
        can have missed any."""
        made = Composition(self.slots, self.moved, draws=self.draws, steady=self.steady)
        made._held, made._watch = self._held, watch
        return made

    @contextmanager
    def over_pass(self) -> Iterator[None]:
        """Context of a pass over all micro-batches. Restores the state if the pass fails."""
        if not self.may_move:
            yield
            return
        if self.moved and self.expected is not None and (name := self.expected.changed()) is not None:
            raise BatchDependent.of_number(name)
        self._there = there = _values_at(self.moved)
        at = {place.key: value for place, value in zip(self.moved, there)}
        self._before, self._after, self._sizes = [at[slot.place.key] for slot in self.slots], [], []
        self._idle = IdlePlaces([slot.place for slot in self.slots])
        self._unseen = None if self._watch is None or is_faking() else self._watch(self.keys, self.steady)
        try:
            yield
            if self._unseen is not None:
                self._unseen.check()
            joined = self._joined() if len(self._sizes) > 1 else None
        except BaseException:
            _put(self.moved, there)
            if self._unseen is not None:
                self._unseen.undo()
            raise
        for i, (slot, (before, _)) in enumerate(zip(self.slots, self._before)):
            if joined is not None:
                slot.place.put(joined[i])
            elif self._idle.is_idle(i) and self._idle.is_certain(i):
                slot.place.put(before)
        self._add_moved([] if self._unseen is None else [(place, (value, None)) for place, value in self._unseen.of_forwards()])
        ends = ((before, slot.place.value()) for (before, _), slot in zip(self._before, self.slots))
        if any(before is MISSING and isinstance(value, _FILLED) for before, value in ends):
            self._held.add(_FILLED)  # the next forward fills what this one has made
        self._after = []

    def begin_whole(self) -> None:
        """Note the state before a forward over the whole batch, which then moves it by itself: a second pass has to find it."""
        self._there = _values_at(self.moved)
        self._before, self._after, self._sizes = [], [], []

    def _joined(self) -> list[Any]:
        values = list(zip(*self._after))
        for slot, (first, *others) in zip(self.slots, values):
            for other in others if isinstance(slot.rule, Last) and not self.draws else ():
                if (first is None) != (other is None):
                    raise BatchDependent.of(slot.place.label)
                check_same(first, other, lambda place=slot.place: place.label)
        return [self._value_of(i, *each) for i, each in enumerate(zip(self.slots, self._before, values))]

    def _value_of(self, index: int, slot: ComposedPlace, before: _Value, values: Sequence[Any]) -> Any:
        value, items = before
        is_idle = self._idle.is_idle(index)
        if is_idle and self._idle.is_certain(index):
            return value
        try:
            joined = slot.rule.joined(value if items is None else items, values, self._sizes)
        except (RuntimeError, TypeError, ValueError):  # of other shapes or lengths than parts of a proof
            raise BatchDependent.of(slot.place.label) from None
        if not is_idle or isinstance(slot.rule, (Last, Mean, Added, Appended)):
            return joined
        if isinstance(slot.place, TensorPlace):  # written through `.data`, or not
            stays = torch.stack([same_entries(each, value).all() for each in values]).all()
            return torch.where(stays, value, joined)
        if self._watch is not None:  # moved or not: it may be either
            raise BatchDependent.of(slot.place.label)
        return joined

    def before_micro_batch(self) -> None:
        """Reset the state to its value at the call."""
        if self._sizes:
            _put([slot.place for slot in self.slots], self._before)
        self._idle.begin()
        if self._unseen is not None:
            self._unseen.before_forward()

    def after_forward(self) -> None:
        """Look for state that the forward has moved and no proof has seen move."""
        if self._unseen is not None:
            self._unseen.after_forward()

    def after_micro_batch(self, samples: int) -> None:
        """Record the state after the forward over `samples` samples and its backward, which may recompute parts of it."""
        if self.slots:
            self._idle.end()
            self._after.append([slot.place.value() for slot in self.slots])
            self._sizes.append(samples)

    @contextmanager
    def kept(self, wanted: bool = True, *, from_call: bool = True) -> Iterator[None]:
        """Context of a pass that repeats another. It starts with the state that the first one started with (unless not
        `from_call`) and leaves the state unchanged."""
        if not wanted:
            yield
            return
        now = _values_at(self.moved)
        with ExitStack() as versions:  # graphs that saved a parameter must not see a newer version of it
            for place in self.trained:
                versions.enter_context(_unsafe_preserve_version_counter(place.tensor))
            try:
                if from_call:
                    self.undone()
                yield
            finally:
                _put(self.moved, now)

    def recount(self) -> None:
        """Put counters of forwards back to where the latest pass found them."""
        for slot, (before, _) in zip(self.slots, self._before):
            if isinstance(slot.rule, Last) and type(value_of(before)) in (int, bool):
                slot.place.put(before)

    def add_later(self, later: Composition) -> None:
        """Take over what a later call has moved, and its values before: a second pass of this call has to find them."""
        self._add_moved(list(zip(later.moved, later._there or ())))

    def _add_moved(self, moves: Sequence[tuple[Place, _Value]]) -> None:
        known = self.keys
        added = [(place, value) for place, value in moves if place.key not in known]
        self.moved = (*self.moved, *(place for place, _ in added))
        self._there = [*(self._there or ()), *(value for _, value in added)]

    def undone(self) -> None:
        """Restore the state before the latest pass."""
        if self._there is not None:
            _put(self.moved, self._there)

    def repeated(self) -> Composition:
        """The composition for a pass that repeats the first one."""
        return _Repeated(self)


class _Repeated(Composition):
    """Starts with the state of another pass and leaves the state unchanged."""

    def __init__(self, first: Composition) -> None:
        super().__init__(first.slots, first.moved, draws=first.draws)
        self._first = first

    @contextmanager
    def over_pass(self) -> Iterator[None]:
        with self._first.kept():
            yield

    def before_micro_batch(self) -> None:
        self._first.before_micro_batch()

    def after_micro_batch(self, samples: int) -> None:
        pass


def is_number(value: Any) -> bool:
    """Whether it is a Python or NumPy number (not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _values_at(places: Sequence[Place]) -> list[_Value]:
    values = [place.value() for place in places]
    return [(value, contents_of(value)) for value in values]


def _put(places: Sequence[Place], values: Sequence[_Value]) -> None:
    for place, (value, contents) in zip(places, values):
        place.put(value)
        if contents is not None:
            refilled(value, contents)
