"""What a script sets on a model between a call and its deferred run: attributes, buffers, submodules and hooks of modules, and
what lies inside attributes. The run gets what was there at the call.

Not covered: what a forward reads outside of its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from memfit.engine.call_contents import CallContents
from memfit.engine.places import MISSING, ContentsPlace, ItemPlace, Place
from memfit.engine.version_checks import Keys

_TABLES = (
    "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_OTHERS = frozenset(nn.Module().__dict__) | {"_flat_weights", "_flat_weight_refs"}
"""What modules keep for themselves. Modes and parameters are captured elsewhere."""
Table = dict[Any, Any]


class CallAttributes:
    """The attributes, buffers, submodules and hooks of modules at a call, and the default dtype."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._dtype = torch.get_default_dtype()
        self._held = [module.__dict__ for module in modules]
        self._attributes = [(each, each.copy()) for each in self._held]
        self.contents = CallContents(self._held, _OTHERS)
        tables = [table for each in self._held for table in _tables_of(each) if table]
        self._tables = [(table, table.copy()) for table in (*tables, *self.contents.tables)]
        self._lists = [(items, list(items)) for items in self.contents.lists]

    @contextmanager
    def put_back(self, moved: Keys) -> Iterator[None]:
        """Context in which they are as at the call, other than at these places, which the forward itself moves."""
        found = [(place, old) for place, old in self._differing() if place.key not in moved]
        holders = {id(place.holder) for place, _ in found if isinstance(place, ItemPlace)}
        orders = [(table, table.copy()) for each in self._held for table in _tables_of(each) if id(table) in holders]
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
            for table, order in orders:  # hooks and layers run in the order of their entries
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
        known = {id(now): before for now, before in (*self._attributes, *self._tables)}
        for table in [table for each in self._held for table in _tables_of(each) if id(table) not in known]:
            known[id(table)] = {}
            self._tables.append((table, known[id(table)]))
        lists = {id(now): before for now, before in self._lists}
        for place, old in written:
            if isinstance(place, ContentsPlace):
                before = lists.get(id(place.container))
                if before is not None and _are_same(before, old):
                    before[:] = place.container
                continue
            assert isinstance(place, ItemPlace)
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
        known = {id(now) for now, _ in self._tables}
        for table in [table for each in self._held for table in _tables_of(each) if table and id(table) not in known]:
            yield from _differing(table, {})


def _tables_of(attributes: Table) -> list[Table]:
    """The buffers, submodules and hooks of a module. (Those of a scripted or traced one are fixed.)"""
    return [table for name in _TABLES if isinstance(table := attributes.get(name), dict)]


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
