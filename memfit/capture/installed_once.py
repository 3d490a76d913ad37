"""Makes lasting what a first forward installs once: hooks on modules, and the flags that say so. transformers does so for
`output_hidden_states` and `output_attentions`.

Whoever runs the model on few samples undoes what it leaves. Without its hooks and flags, each micro-batch would install them
again. A weight that the first of several forwards computes and the others read (`parametrize.cached()`, `if self.w is None:`)
is refused: only one backward can go through its graph. Not covered: flags elsewhere than in attributes of modules, and modules
or parameters that are made in a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import is_
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from memfit._errors import Refused
from memfit.batches.tree import tensors
from memfit.engine.modules import modules_of
from memfit.engine.places import refilled
from memfit.engine.state_changes import KINDS, OF_MODULES
from memfit.engine.undo_state import MADE_LATER

_TABLES = (*KINDS, *(f"{kind}_{kinds}" for kind in KINDS[:2] for kinds in ("with_kwargs", "always_called")))
Table = dict[Any, Any]


class InstalledOnce:
    """What the forwards of a model install, by looks at its modules before and after each."""

    def __init__(self, model: nn.Module) -> None:
        cache = {"a cached parametrization": parametrize._cache}
        self._attributes = [*(module.__dict__ for module in modules_of(model)), cache]
        self._tables = [each[name] for each in self._attributes for name in _TABLES if isinstance(each.get(name), dict)]
        self._looks = [self._look()]

    def ran(self, output: Any) -> Any:
        """Look after a forward. Returns its output."""
        self._looks.append(self._look())
        return output

    def keep(self) -> None:
        """Install for good what the first forward did and the second did not, after both were undone. Raises Refused if each of
        them installs hooks, and if the second one read a graph of the first."""
        if len(self._looks) < 3:
            return
        before, first, *others = self._looks
        once = list(self._made_once(before[1], first[1], others[0][1]))
        for name in (name for _, name, (_, items), then in once if _has_graph(items) and _are_same((0, items), (0, then))):
            raise _refused(f"its first forward computes {name}, and those after it go on with the graph of that", _EACH)
        added = [(table, new) for table, *looks in zip(self._tables, before[0], first[0]) if (new := _added(*looks))]
        if not added:
            return
        if any(_added(one, other) for one, other in zip(first[0], others[0][0])):
            raise _refused("its forward registers hooks at every call, as every micro-batch would")
        if before[2] != first[2]:
            raise _refused("its first forward registers hooks and makes or replaces parameters, buffers or modules")
        held = [_lasting(name, items, then) for _, name, (_, items), then in once]
        for table, new in added:
            table.update(new)
        for (attributes, name, (value, items), _), lasting in zip(once, held):
            attributes[name] = value
            if value is not items:
                refilled(value, lasting)

    def _made_once(self, *looks: list[dict[str, tuple[Any, Any]]]) -> Iterator[tuple[Table, str, tuple[Any, Any], Any]]:
        """Yield the attributes that the first forward set and the second did not, and containers that it filled: where they
        are, their name, what it left, and what they held after the second."""
        for attributes, old, now, then in zip(self._attributes, *looks):
            for name, made in now.items():
                if name in old and _are_parameters(old[name][1]):
                    continue  # which a recurrent layer collects anew when they are replaced, as they are while planning
                if not _are_same(old.get(name), made) and name in then and then[name][0] is made[0]:
                    if name not in old or old[name][0] is not made[0] or _are_same(then[name], made):
                        yield attributes, name, made, then[name][1]

    def _look(self) -> tuple[list[Table], list[dict[str, tuple[Any, Any]]], list[list[str]]]:
        names: list[list[str]] = [list(_table(each, name)) for each in self._attributes for name in MADE_LATER]
        return [dict(table) for table in self._tables], [_attributes_in(each) for each in self._attributes], names


_ONCE = "run the model once before memfit.wrap"
_EACH = "compute it in each forward, or give it a budget in which the batch runs whole"


def _table(attributes: Table, name: str) -> Table:
    found = attributes.get(name)
    return found if isinstance(found, dict) else {}  # a scripted module has tables of its own


def _refused(found: str, next_move: str = _ONCE) -> Refused:
    return Refused("running a model in micro-batches", found=found, next_move=next_move)


def _added(before: Table, after: Table) -> Table:
    return {key: value for key, value in after.items() if key not in before}


def _attributes_in(held: Table) -> dict[str, tuple[Any, Any]]:
    """The attributes of a module: each value, with a copy of what a list or dictionary holds."""
    found = {name: value for name, value in held.items() if name not in OF_MODULES and name not in _TABLES}
    return {name: (value, value.copy() if type(value) in (list, dict, set) else value) for name, value in found.items()}


def _are_same(one: tuple[Any, Any] | None, other: tuple[Any, Any]) -> bool:
    if one is None or one[0] is not other[0]:
        return False
    if not isinstance(one[1], (list, dict, set)):
        return True
    values = [list(each.values()) if isinstance(each, dict) else list(each) for each in (one[1], other[1])]
    return len(values[0]) == len(values[1]) and all(map(is_, *values))


def _are_parameters(items: Any) -> bool:
    return isinstance(items, list) and bool(items) and all(isinstance(item, (nn.Parameter, weakref.ref)) for item in items)


def _lasting(name: str, items: Any, then: Any) -> Any:
    """Return what of these contents is there before every forward but the first. What each forward fills in is not. Raises
    Refused for a value that cannot be kept, as it was made while planning."""
    if not isinstance(items, (list, dict, set)):
        if not _is_flag(items):
            raise _refused(f"its first forward registers hooks and makes {name}, on which they may depend")
        return items
    if not isinstance(items, dict):
        return items if _is_flag(items) and len(items) == len(then) else type(items)()
    if any(_is_flag(value) and then.get(key) is not value for key, value in items.items()):
        raise _refused(f"its first forward registers hooks and makes {name}, which the next ones change")
    return {key: value for key, value in items.items() if _is_flag(value)}


def _has_graph(value: Any) -> bool:
    return any(tensor.grad_fn is not None for tensor in tensors(value))


def _is_flag(value: Any) -> bool:
    """Whether it is a plain value, or handles of hooks."""
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_flag, value))
    if isinstance(value, dict):
        return all(map(_is_flag, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, RemovableHandle))
