"""What a script sets on a model between a call and its deferred run: attributes, buffers, submodules and hooks of modules, and
what lies inside attributes; globals, variables and class attributes that their code names. The run gets what was there at the
call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import nn

from memfit.engine.call_contents import CallContents
from memfit.engine.forward_reads import ForwardReads
from memfit.engine.places import MISSING, ContentsPlace, ItemPlace, Place
from memfit.engine.version_checks import Keys

_TABLES = (
    "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_BASE = list(nn.Module().__dict__)
_FIRST, _LAST = _BASE[0], _BASE[-1]
_OTHERS = frozenset(_BASE) | {"_flat_weights", "_flat_weight_refs"}
"""What modules keep for themselves. Modes and parameters are captured elsewhere. (The tables of a scripted or traced module are
fixed, and no dictionaries.)"""
Table = dict[Any, Any]


class CallAttributes:
    """The attributes, buffers, submodules and hooks of modules at a call, what lies inside and what their code names, and the
    default dtype."""

    def __init__(self, modules: Sequence[nn.Module], reads: ForwardReads) -> None:
        self._dtype = torch.get_default_dtype()
        held = [module.__dict__ for module in modules]
        tables = [table for each in held for name in _TABLES if isinstance(table := each.get(name), dict)]
        found = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        values = chain((value for each in held for value in _own(each)), (v for table in found for v in table.values()))
        self.contents = CallContents(values, set(map(type, modules)), reads)
        self._orders = {id(table) for table in tables}
        self._attributes = [(each, each.copy()) for each in held]
        self._tables = [(table, table.copy()) for table in (*found, *self.contents.tables)]
        self._lists = [(items, list(items)) for items in self.contents.lists]

    @contextmanager
    def put_back(self, moved: Keys) -> Iterator[None]:
        """Context in which they are as at the call, other than at these places, which the forward itself moves."""
        found = [(place, old) for place, old in self._differing() if place.key not in moved]
        holders = [place.holder for place, _ in found if isinstance(place, ItemPlace)]
        orders = {id(table): (table, table.copy()) for table in holders if id(table) in self._orders}
        later = [(place, place.value()) for place, _ in found]
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        for place, old in found:
            place.put(old)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            for place, value in later:
                place.put(value)
            for table, order in orders.values():  # hooks and layers run in the order of their entries
                table.clear()
                table.update(order)

    def differ(self, moved: Keys) -> bool:
        """Whether anything is different now, other than at these places."""
        return self._dtype != torch.get_default_dtype() or any(place.key not in moved for place, _ in self._differing())

    def written(self) -> list[tuple[Place, Any]]:
        """Return what is different now, with what it was."""
        return list(self._differing())

    def accept(self, written: Iterable[tuple[Place, Any]]) -> None:
        """Take over what another call's forward wrote where it was the same before."""
        for table in [table for table in self._empty if table]:
            self._tables.append((table, {}))
        self._empty = [table for table in self._empty if not table]
        known = {id(now): before for now, before in (*self._attributes, *self._tables)}
        lists = {id(now): before for now, before in self._lists}
        for place, old in written:
            if isinstance(place, ContentsPlace):
                before = lists.get(id(place.container))
                if before is not None and _are_same(before, old):
                    before[:] = place.container
            elif self.contents.places.get(place.key, (None, MISSING))[1] is old:
                self.contents.places[place.key] = place, place.value()
            elif isinstance(place, ItemPlace):
                before = known.get(id(place.holder))
                if before is not None and before.get(place.name, MISSING) is old:
                    ItemPlace(before, place.name, place.label).put(place.value())

    def _differing(self) -> Iterator[tuple[Place, Any]]:
        for now, before in self._attributes:
            yield from _differing(now, before, _OTHERS)
        for now, before in self._tables:
            yield from _differing(now, before)
        for now, before in self._lists:
            if not _are_same(now, before):
                yield ContentsPlace(now, "a list"), before
        for place, before in list(self.contents.places.values()):
            if (now := place.value()) is not before and not _is_memfits(now) and not _is_memfits(before):
                yield place, before
        for table in self._empty:
            if table:
                yield from _differing(table, {})


def _own(attributes: Table) -> Iterable[Any]:
    """The values of a module's attributes, without those that `nn.Module` sets, in this order, before others."""
    names = iter(attributes)
    if next(names, None) == _FIRST and next(islice(names, len(_BASE) - 2, None), None) == _LAST:
        return islice(attributes.values(), len(_BASE), None)
    return [value for name, value in attributes.items() if name not in _OTHERS]


def _differing(now: Table, before: Table, skipped: Set[str] = frozenset()) -> Iterator[tuple[ItemPlace, Any]]:
    """Yield each entry that is another object now, with what it was."""
    if len(now) == len(before) and all(map(is_, now.values(), before.values())):
        return
    for name in (now.keys() | before.keys()) - skipped:
        old, new = before.get(name, MISSING), now.get(name, MISSING)
        if old is not new and not _is_memfits(old) and not _is_memfits(new):
            yield ItemPlace(now, name, str(name)), old


def _are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


def _is_memfits(value: Any) -> bool:
    return type(value).__module__.startswith("memfit.")
