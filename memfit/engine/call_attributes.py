"""What a script sets on a model between a call and its deferred run: attributes, buffers, submodules and hooks of modules, and
what lies inside attributes; globals, variables and class attributes that their code names. The run gets what was there at the
call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import nn

from memfit.engine.call_contents import CallContents, without_graph
from memfit.engine.forward_reads import ForwardReads
from memfit.engine.places import MISSING, ContentsPlace, ItemPlace, Place, refilled
from memfit.engine.read_numbers import Computed, Numbers, is_one_of_several_processes, token_of, token_of_filling, token_of_list
from memfit.engine.version_checks import Keys, keys_of_values

_TABLES = (
    "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_BACKWARD_TABLES = ("_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES = [
    getattr(torch.nn.modules.module, f"_global_{name}")
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
]
"""Hooks that run for every module (`register_module_forward_hook`)."""
_BASE = list(nn.Module().__dict__)
_FIRST, _LAST = _BASE[0], _BASE[-1]
_COUNTER = "num_batches_tracked"
"""A buffer of batch norms, which decides nothing."""
_OTHERS = frozenset(_BASE) | {"_flat_weights", "_flat_weight_refs"}
"""What modules keep for themselves. Modes and parameters are captured elsewhere. (The tables of a scripted or traced module are
fixed, and no dictionaries.)"""
Table = dict[Any, Any]
_COLUMNS = (list, tuple)
"""Of arguments, these hold an item per sample."""


class CallAttributes:
    """The attributes, buffers, submodules and hooks of modules at a call, what lies inside and what their code names, the same
    of objects among the arguments `given`, and the default dtype."""

    def __init__(
        self, modules: Sequence[nn.Module], reads: ForwardReads, code: Sequence[Any] = (), given: Sequence[Any] = ()
    ) -> None:
        self._dtype = torch.get_default_dtype()
        held = [module.__dict__ for module in modules]
        self._held = [(each, _base_of(each)) for each in held]
        self._buffers = [(table, 0) for each in held if (table := each.get("_buffers")) and _COUNTER not in table]
        hooks = [table for each in held for name in (*_TABLES[2:], *_BACKWARD_TABLES) if (table := each.get(name))]
        self._hooks = [*hooks, *filter(None, _OF_ALL_MODULES)]
        self._kinds = tuple((weakref.ref(kind), id(getattr(kind, "forward", None))) for kind in map(type, modules))
        tables = [table for each in held for name in _TABLES if isinstance(table := each.get(name), dict)]
        found = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        values = chain((value for each in self._held for value in _own(*each)), (v for table in found for v in table.values()))
        self._given = given
        objects = (value for value in given if type(value) not in _COLUMNS)
        code = [*dict.fromkeys(map(type, modules)), *code]
        self.contents = CallContents(chain(values, objects), code, reads, map(id, modules))
        self._attributes = [(each, each.copy()) for each in (*held, *self.contents.objects)]
        self._tables = [(table, table.copy()) for table in (*found, *self.contents.tables)]
        self._lists = [(items, list(items)) for items in self.contents.lists]
        self._let_go_of(_is_memfits)

    def numbers(self, moved: Keys) -> Numbers:
        """Return what the forward may branch on, and what of it the forward moves itself."""
        found, holders = Numbers({}, {}, {}, set()), {key[0] for key in moved}
        for number, (table, base) in enumerate(self._all_held()):
            entries = islice(table.items(), base, None) if base else table.items()
            found.add_all(number, entries, partial(_is_moved, table, moved, found.held, number) if moved else None)
            if id(table) in holders:
                found.held.add(number)
        for number, items in enumerate(self.contents.lists):
            found.add(("list", number), token_of_list(items), moved=(id(items),) in moved)
            found.add(("filled", number), token_of_filling(items), moved=False)
            if id(items) in holders:
                found.held.add(("list", number))
        for number, value in enumerate(self._given):
            if type(value) not in _COLUMNS:
                found.add(("given", number), token_of(value), moved=False)
        hooks = (tuple(token_of(hook) for hook in table.values() if not _is_of_sharding(hook)) for table in self._hooks)
        for number, tokens in enumerate(filter(None, hooks)):
            found.add(("hooks", number), tokens, moved=False)
        for number, (place, value) in enumerate(self.contents.places.values()):
            found.add(number, token_of(value), moved=place.key in moved or _is_written(value, moved), value=value)
        found.add("modes", tuple(each.get("training") for each, _ in self._held), moved=False)
        found.add("classes", self._kinds, moved=False)
        found.add("trained", tuple(self._trained()), moved=False)
        return found

    def places(self, wanted: Iterable[Hashable]) -> dict[Hashable, Place]:
        """Return where these numbers are. (Numbers of lists are not told one by one.)"""
        tables = [table for table, _ in self._all_held()]
        given, places = set(wanted), dict(enumerate(place for place, _ in self.contents.places.values()))
        found: dict[Hashable, Place] = {key: place for key, place in places.items() if key in given}
        for key in given - found.keys():
            if isinstance(key, tuple) and isinstance(key[0], int):
                found[key] = ItemPlace(tables[key[0]], key[1], str(key[1]))
        return found

    def _trained(self) -> Iterator[bool | None]:
        """Whether each parameter is trained; None where a module has none under the name."""
        tables = (each.get("_parameters") for each, _ in self._held)
        return (None if p is None else p.requires_grad for table in tables if table for p in table.values())

    def _all_held(self) -> Iterator[tuple[Table, int]]:
        """The dictionaries in which numbers are looked for, each with how many entries to skip."""
        inside = ((table, 0) for table in chain(self.contents.objects, self.contents.tables))
        return chain(self._held, self._buffers, inside)

    def let_go(self) -> None:
        """Let go of graphs that the script has left in attributes and globals, as no gradient reaches them any more. (The call
        that such an output belongs to may hold an earlier one.)"""
        self._let_go_of(lambda value: True)
        self.contents.let_go()

    def _let_go_of(self, chosen: Callable[[Any], bool]) -> None:
        if not self.contents.have_graphs:
            return
        for _, before in (*self._attributes, *self._tables):
            before.update({name: without_graph(value) for name, value in before.items() if chosen(value)})
        for _, items in self._lists:
            items[:] = [without_graph(value) if chosen(value) else value for value in items]

    def since(self, moved: Keys) -> Since | None:
        """Return what is different now, other than at these places, which the forward itself moves; None if nothing is."""
        tables = [(table, before) for table, before in self._all_tables() if _moves(table, before, moved)]
        places = [(place, old) for place, old in self._other_places() if place.key not in moved]
        if not tables and not places and self._dtype == torch.get_default_dtype():
            return None
        return Since(self._dtype, tables, places, moved)

    def written(self) -> list[tuple[Place, Any]]:
        """Return what is different now, with what it was."""
        entries = (each for table, before in self._all_tables() for each in _differing(table, before))
        return [*entries, *self._other_places()]

    def accept(self, written: Iterable[tuple[Place, Any]]) -> None:
        """Take over what another call's forward wrote where it was the same before."""
        self._tables = list(self._all_tables())
        self._empty = [table for table in self._empty if not table]
        known = {id(now): before for now, before in (*self._attributes, *self._tables)}
        lists = {id(now): before for now, before in self._lists}
        for place, old in written:
            if isinstance(place, ContentsPlace):
                before = lists.get(id(place.container))
                if before is not None and _are_same(before, old):
                    before[:] = place.container
            elif place.key in self.contents.places:
                if self.contents.places[place.key][1] is old:
                    self.contents.places[place.key] = place, place.value()
            elif isinstance(place, ItemPlace):
                before = known.get(id(place.holder))
                if before is not None and before.get(place.name, MISSING) is old:
                    ItemPlace(before, place.name, place.label).put(place.value())

    def _all_tables(self) -> Iterator[tuple[Table, Table]]:
        yield from self._tables
        for table in self._empty:
            if table:
                yield table, {}

    def _other_places(self) -> Iterator[tuple[Place, Any]]:
        for now, before in self._attributes:
            yield from _differing(now, before, _OTHERS)
        for now, before in self._lists:
            if not _are_same(now, before):
                yield ContentsPlace(now, "a list"), before
        for place, before in self.contents.places.values():
            if (now := place.value()) is not before and not _is_memfits(now) and not _is_memfits(before):
                yield place, before


class Attributes:
    """The attributes of modules at a call, recorded when first asked for. `code` is read besides theirs, and the objects among
    the arguments `given`."""

    def __init__(
        self, modules: Sequence[nn.Module], reads: ForwardReads, code: Sequence[Any] = (), given: Iterable[Any] = ()
    ) -> None:
        self._modules, self._reads, self._code = modules, reads, code
        self._given = [value for value in given if not isinstance(value, torch.Tensor)]
        self._found: CallAttributes | None = None
        self._numbers: tuple[Keys, Numbers] | None = None

    def numbers(self, moved: Keys) -> Numbers:
        """Return `CallAttributes.numbers`."""
        self._found = self._found or self.now()
        if self._numbers is None or self._numbers[0] != moved:
            self._numbers = moved, self._found.numbers(moved)
        return self._numbers[1]

    def places(self, wanted: Iterable[Hashable]) -> dict[Hashable, Place]:
        """Return where these numbers are: `CallAttributes.places`."""
        self._found = self._found or self.now()
        return self._found.places(wanted)

    def have_graphs(self) -> bool:
        """Whether a tensor among them was computed from parameters before the call."""
        found = self.numbers(frozenset())
        assert self._found is not None
        if is_one_of_several_processes():
            return False
        return self._found.contents.have_graphs or any(value is Computed for value in found.values.values())

    def at_call(self) -> CallAttributes:
        """Return the record."""
        found = self._found
        self.forget()
        return found or self.now()

    def now(self) -> CallAttributes:
        """Return a record of what is there now."""
        return CallAttributes(self._modules, self._reads, self._code, self._given)

    def forget(self) -> None:
        """Record again later. Called before memfit runs the model, which may install hooks. (A search for what holds an output
        must not find the record.)"""
        self._found = self._numbers = None


class Since:
    """What the script has changed since a call. A forward runs as if it had not: code of its backward, as hooks, reads what the
    script has set, as in plain PyTorch."""

    def __init__(
        self, dtype: torch.dtype, tables: list[tuple[Table, Table]], places: list[tuple[Place, Any]], moved: Keys
    ) -> None:
        self._dtype, self._tables, self._places, self._moved = dtype, tables, places, moved

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Context for one forward. What the forward itself changes stays."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            for place, old in self._places:
                stack.callback(_give_back, place, old, place.value())
                place.put(old)
            for table, before in self._tables:
                later, given = table.copy(), self._as_before(table, before)
                stack.callback(_give_table_back, table, given, later)
                refilled(table, given)
            yield

    def _as_before(self, table: Table, before: Table) -> Table:
        """The entries of before, in their order, but those that the forward itself moves, and memfit's own."""
        found = dict(before)
        for key in (*before, *(key for key in table if key not in before)):
            old, now = before.get(key, MISSING), table.get(key, MISSING)
            if (id(table), key) in self._moved or _is_memfits(old) or _is_memfits(now):
                ItemPlace(found, key, "").put(now)
        return found


def _give_back(place: Place, given: Any, later: Any) -> None:
    if isinstance(place, ContentsPlace) or place.value() is given:
        place.put(later)


def _give_table_back(table: Table, given: Table, later: Table) -> None:
    found = dict(later)
    for place, _ in _differing(table, given):
        ItemPlace(found, place.name, "").put(place.value())
    refilled(table, found)


def _moves(table: Table, before: Table, moved: Keys) -> bool:
    """Whether a table differs, other than at these places. (Hooks and layers run in the order of their entries.)"""
    if _are_same_values(table, before):
        return False
    in_order = [key for key in table if key in before] == [key for key in before if key in table]
    return not in_order or any(place.key not in moved for place, _ in _differing(table, before))


def _own(attributes: Table, base: int) -> Iterable[Any]:
    """The values of a module's attributes, without those that `nn.Module` sets."""
    if base:
        return islice(attributes.values(), base, None)
    return [value for name, value in attributes.items() if name not in _OTHERS]


def _base_of(attributes: Table) -> int:
    """How many attributes `nn.Module` has set, if it did so in this order, before others; else 0."""
    names = iter(attributes)
    in_order = next(names, None) == _FIRST and next(islice(names, len(_BASE) - 2, None), None) == _LAST
    return len(_BASE) if in_order else 0


def _differing(now: Table, before: Table, skipped: Set[str] = frozenset()) -> Iterator[tuple[ItemPlace, Any]]:
    """Yield each entry that is another object now, with what it was."""
    if _are_same_values(now, before):
        return
    for name in [name for name in (*before, *(name for name in now if name not in before)) if name not in skipped]:
        old, new = before.get(name, MISSING), now.get(name, MISSING)
        if old is not new and not _is_memfits(old) and not _is_memfits(new):
            yield ItemPlace(now, name, str(name)), old


def _are_same_values(now: Table, before: Table) -> bool:
    return len(now) == len(before) and all(map(is_, now.values(), before.values()))


def _are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


def _is_memfits(value: Any) -> bool:
    return type(value).__module__.startswith("memfit.")


def _is_moved(table: Table, moved: Keys, held: set[Hashable], number: int, name: str, value: Any) -> bool:
    """Whether the forward moves an entry; adds it to `held` if that is a tensor that it writes."""
    if _is_written(value, moved):
        held.add((number, name))
        return True
    return (id(table), name) in moved


def _is_written(value: Any, moved: Keys) -> bool:
    return bool(moved) and isinstance(value, torch.Tensor) and any(key in moved for key in keys_of_values(value, value))


def _is_of_sharding(hook: Any) -> bool:
    """Whether a hook is memfit's or torch's own, which come and go with passes, on some ranks only."""
    made = getattr(hook, "__module__", None) or type(hook).__module__
    return made.startswith(("memfit.", "torch.distributed."))
