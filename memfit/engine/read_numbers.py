"""Values that a forward may branch on: numbers, words, members of enums, dtypes, functions and short lists of these, in
attributes of the script's own modules and objects, in dictionaries there, in objects among the arguments, in globals and in
variables of closures; and which hooks there are. Calls under others may do something else: a model in stages, a task's number.

Of numbers that the forward moves itself, or that change at nearly every call without the forward ever doing something else
(counters), only the answers to what the forward asks of them are compared (`asked_numbers.py`). Not covered: tensors and
arrays, but for single numbers on the host; slots.
"""

from __future__ import annotations

import enum
import functools
import math
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from memfit.engine.asked_numbers import Notes, Questions, answers_of, is_asked_of, questions_of, value_of
from memfit.engine.user_code import is_installed

MOST = 8
"""Values of one place after which, if the forward did the same under all of them, the place is no longer watched."""
FEW = 8
"""Items of a list that are compared. Of a longer one, only the length is."""


class Nothing:
    """Stands for a value that is not compared."""


class Computed:
    """Stands for a tensor that has a graph."""


def token_of(value: Any) -> Hashable:
    """Return what tells this value from others that a forward may treat otherwise: `Nothing` if it is not compared. Of a float
    only the sign decides, as it may be a rate that is annealed."""
    token = _TOKENS[type(value)]
    return Nothing if token is None else token(value)


class _Tokens(dict[type, Callable[[Any], Hashable] | None]):
    """How values of a type are compared; None: not at all. Classes of the script are not kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self._of_script = weakref.WeakKeyDictionary[type, Any]()

    def __missing__(self, kind: type) -> Callable[[Any], Hashable] | None:
        if kind in self._of_script:
            return self._of_script[kind]
        found = next((token for base, token in _BY_TYPE if issubclass(kind, base)), None)
        if found is None and kind.__module__ == "numpy" and hasattr(kind, "item"):
            found = _of_numpy
        known = self if is_installed(kind.__module__) else self._of_script
        known[kind] = found
        return found


def _itself(value: Any) -> Hashable:
    return value


def _sign(value: float) -> Hashable:
    return math.copysign(1.0, value) if value else value


def _of_numpy(value: Any) -> Hashable:
    """Compare a number, or an array that holds a single one."""
    return token_of(value.item()) if value.size == 1 else Nothing


def _of_method(value: types.MethodType) -> Hashable:
    return token_of(value.__func__)


def _of_partial(value: functools.partial[Any]) -> Hashable:
    return token_of(value.func), _of_items(value.args), _of_items(list(value.keywords.items()))


def _of_items(items: Sequence[Any]) -> Hashable:
    tokens = tuple(map(token_of, items)) if len(items) <= FEW else ()
    return len(items), tokens


def _of_set(items: Set[Any]) -> Hashable:
    return len(items), frozenset(map(token_of, items)) if len(items) <= FEW else None


def _of_tensor(value: torch.Tensor) -> Hashable:
    """Compare a single number on the host, and whether there is a graph. (Reading another would wait for its device.)"""
    if type(value) is torch.Tensor and value.grad_fn is not None and not is_one_of_several_processes():
        return Computed
    if value.numel() != 1 or value.device.type != "cpu" or type(value) is not torch.Tensor or value.requires_grad:
        return Nothing
    return token_of(value.item()) if value.layout is torch.strided and not value.is_quantized else Nothing


def is_one_of_several_processes() -> bool:
    """Whether there are others. (Then only some may keep a tensor with a graph, as a loss to log, and all prove together.)"""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


_BY_TYPE: tuple[tuple[type, Callable[[Any], Hashable]], ...] = (
    (enum.Enum, _itself),
    (torch.Tensor, _of_tensor),
    (float, _sign),
    *((kind, _itself) for kind in (type(None), bool, int, str, complex, bytes, type, torch.dtype, torch.device)),
    (types.BuiltinFunctionType, _itself),
    (types.FunctionType, lambda function: function.__code__),
    (types.MethodType, _of_method),
    (functools.partial, _of_partial),
    (tuple, _of_items),
    *((kind, _of_set) for kind in (set, frozenset)),
)
_TOKENS = _Tokens()


def token_of_list(items: Sequence[Any]) -> Hashable:
    """Return what tells a list of the script from others."""
    return _of_items(list(items))


def token_of_filling(items: Sequence[Any]) -> Hashable:
    """Return what tells a list that the forward fills from what it is at other calls: whether it is empty, or full."""
    return bool(items), len(items) == getattr(items, "maxlen", None)


IsMoved = Callable[[str, Any], bool]


class Numbers(NamedTuple):
    """What the forward may branch on at a call."""

    values: dict[Hashable, Any]
    """By where they were found: the number of a container and a name in it, or the number of a place that code names."""
    moved: dict[Hashable, Any]
    """Those that the forward itself moves, as they are."""
    floats: dict[Hashable, float]
    """Floats among `values`, as they are."""
    held: set[Hashable]
    """Where containers and tensors are that the forward moves something in."""

    def add_all(self, number: Hashable, entries: Iterable[tuple[Any, Any]], is_moved: IsMoved | None) -> None:
        """Add the entries with a name, if such values are compared. `is_moved` tells of a name and its value whether the
        forward moves it; None: it moves nothing."""
        tokens, values = _TOKENS, self.values
        for name, value in entries:
            token = tokens[type(value)]
            if token is None or type(name) is not str:
                continue
            if is_moved is not None and is_moved(name, value):
                self.moved[number, name] = value_of(value)
            elif (found := token(value)) is not Nothing:
                values[number, name] = found
                if type(value) is float:
                    self.floats[number, name] = value

    def add(self, place: Hashable, token: Hashable, *, moved: bool, value: Any = None) -> None:
        """Add what tells one value from others."""
        if moved:
            self.moved[place] = value_of(value)
        elif token is not Nothing:
            self.values[place] = token
            if type(value) is float:
                self.floats[place] = value

    def number_at(self, place: Hashable) -> Any:
        """Return what was found at a place."""
        return next((found[place] for found in (self.moved, self.floats, self.values) if place in found), None)


class Variants:
    """Tells calls of one signature apart by the numbers that they were made with, where those change what the model does."""

    def __init__(self) -> None:
        self._known: list[tuple[Numbers, int]] = []
        self._watches: list[dict[Hashable, Any]] = []
        self._values: defaultdict[Hashable, set[Any]] = defaultdict(set)
        self._floats: dict[Hashable, float] = {}
        self._left_out: set[Hashable] = set()
        self._questions: dict[Hashable, Questions] = {}
        self._unasked: set[Hashable] = set()

    def of(self, numbers: Numbers) -> int | None:
        """Return the variant of calls with these numbers, or None if they are new."""
        self._look_for_counters(numbers)
        watched = self._watched(numbers)
        for watches, (_, variant) in zip(reversed(self._watches), reversed(self._known)):
            if watches == watched:
                return variant
        return None

    def unasked(self, numbers: Numbers) -> list[Hashable]:
        """Return the places whose questions are to be learned: those of counters, once more under other answers."""
        self._look_for_counters(numbers)
        found = [place for place in self._unasked if is_asked_of(numbers.number_at(place))]
        self._unasked.clear()
        return found

    def learn(self, places: Iterable[Hashable], notes: Mapping[Hashable, Notes]) -> None:
        """Add what the forward asks of the numbers at these places; nothing where there are no notes."""
        for place in places:
            asked = dict.fromkeys(self._questions.get(place, ())) | notes.get(place, {})
            self._questions[place] = () if ("answers", place) in self._left_out else questions_of(asked)
        self._watch_again()

    def has_asked(self, place: Hashable) -> bool:
        """Whether it is known what the forward asks of the number at a place."""
        return place in self._questions

    @property
    def questions(self) -> dict[Hashable, Questions]:
        """What the forward asks of counters, by place."""
        return {place: questions for place, questions in self._questions.items() if questions}

    def choose(self, numbers: Numbers, does_the_same: Callable[[int], bool | None]) -> int:
        """Return the variant for new numbers: the latest under which the model `does_the_same`, else another one. If it returns
        None, this batch cannot tell: nothing is remembered."""
        variants = list(dict.fromkeys(variant for _, variant in reversed(self._known)))
        found = None
        for variant in variants:
            same = does_the_same(variant)
            if same is None:
                return variant
            if same:
                found = variant
                break
        self._known.append((numbers, len(variants) if found is None else found))
        self._watches.append(self._watched(numbers))
        self._unasked.update(self._left_out, self._questions)
        if found is None:
            return len(variants)
        for place, value in self._watches[-1].items():
            self._values[place].add(value)
        self._leave_out({place for place, values in self._values.items() if len(values) > MOST})
        return found

    def _look_for_counters(self, numbers: Numbers) -> None:
        """Leave out what the forward moves, and ask about floats that have changed."""
        self._leave_out(numbers.moved)
        if numbers.floats != self._floats:
            before, self._floats = self._floats, numbers.floats
            changed = {place for place, value in numbers.floats.items() if before.get(place, value) != value}
            self._unasked |= changed - self._questions.keys()

    def _leave_out(self, places: Iterable[Hashable]) -> None:
        new = [place for place in places if place not in self._left_out]
        if new:
            self._left_out.update(new)
            self._unasked.update(new)
            self._watch_again()

    def _watch_again(self) -> None:
        self._watches = [self._watched(numbers) for numbers, _ in self._known]

    def _watched(self, numbers: Numbers) -> dict[Hashable, Any]:
        """Return what tells numbers from others: values, and answers of counters."""
        if not self._left_out and not self._questions:
            return numbers.values
        answers = {("answers", place): answers_of(numbers.number_at(place), asked) for place, asked in self.questions.items()}
        return {place: value for place, value in (numbers.values | answers).items() if place not in self._left_out}
