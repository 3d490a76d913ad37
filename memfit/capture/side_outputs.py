"""Side effects: tensors that leave a forward by other ways than its output. They are taken per micro-batch, joined like the
output, and put in place for the script.

Not covered: places outside the model's modules that every forward creates again.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from types import CellType
from typing import Any

from memfit.batches.tree import container_at, with_new_containers
from memfit.capture.outputs import SideOutput

_MISSING: Any = object()
_RETURNED = "the argument that it returns"


class ClosureVariable(dict[str, Any]):
    """A closure variable of a function around a forward hook, as a one-item mapping."""

    def __init__(self, cell: CellType) -> None:
        super().__init__()
        self._cell = cell

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return default

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value

    def pop(self, key: str, *default: Any) -> None:
        del self._cell.cell_contents


class Door:
    """A place `owner[key]` where a forward leaves a side effect. A list or dict that stays the same object is filled."""

    copies_arguments = False
    """Whether the forward runs with containers of its own in its arguments."""

    def __init__(self, name: str, owner: MutableMapping[str, Any], key: str) -> None:
        self.name, self._owner, self._key = name, owner, key
        self._fills = False
        self._dropped: int | None = 0
        """How many of the first items a forward drops from a list; None: all."""
        self._was_registered = self._registered()

    @property
    def is_registered_now(self) -> bool:
        """Whether the module has got a parameter or buffer of this name since (`prune.remove`). An attribute would hide it."""
        return self._registered() and not self._was_registered

    def _registered(self) -> bool:
        return any(table in self._owner and self._key in self._owner[table] for table in ("_parameters", "_buffers"))

    def before(self, arguments: Any) -> Any:
        """Return what is there before a forward with these arguments."""
        found = self._owner.get(self._key, _MISSING)
        return found, found.copy() if isinstance(found, (list, dict)) else None

    def taken(self, before: Any) -> Any:
        """Return what a forward left there, and restore what was there before."""
        old, contents = before
        found = self._owner.get(self._key, _MISSING)
        self._fills = found is old and contents is not None
        if contents is None or found is not old:
            self._put_back(old)
            return None if found is _MISSING or found is old else found
        if isinstance(found, dict):
            new: Any = {key: value for key, value in found.items() if value is not contents.get(key, _MISSING)}
            found.clear()
            found.update(contents)
            return new
        kept = [a is b for a, b in zip(found, contents)]
        dropped = next(n for n in range(len(contents) + 1) if _begins_with(found, contents[n:]))
        if any(kept) and dropped and len(found) == len(contents):
            new = [None if same else item for same, item in zip(kept, found)]
        else:
            new = found[len(contents) - dropped :]
            if contents:  # (one that was empty does not tell)
                self._dropped = dropped if dropped < len(contents) else None
        found[:] = contents
        return new

    def put(self, value: Any, arguments: Any) -> None:
        """Leave this value there, as a forward with these arguments would."""
        if value is None:
            return
        if not self._fills:
            self._owner[self._key] = value
            return
        there = self._owner.get(self._key)
        if isinstance(there, dict):
            there.update(value)
        elif isinstance(there, list):
            if len(value) == len(there) and any(item is None for item in value):
                there[:] = [old if new is None else new for old, new in zip(there, value)]
            else:
                there[:] = [*there[len(there) if self._dropped is None else self._dropped :], *value]

    def _put_back(self, old: Any) -> None:
        if old is _MISSING:
            self._owner.pop(self._key, None)
        else:
            self._owner[self._key] = old


def _begins_with(found: list[Any], items: list[Any]) -> bool:
    return len(items) <= len(found) and all(a is b for a, b in zip(found, items))


class Doorway:
    """Wraps a forward to return its output together with the side effects it leaves at `doors`."""

    def __init__(self, plain: Callable[..., Any], doors: Sequence[Door]) -> None:
        self.plain, self.doors = plain, tuple(doors)

    def __call__(self, *args: Any, **kwargs: Any) -> SideOutput:
        if any(door.copies_arguments for door in self.doors):
            args, kwargs = with_new_containers((args, kwargs))
        before = [door.before((args, kwargs)) for door in self.doors]
        beside, output = {}, None
        try:
            output = self.plain(*args, **kwargs)
        finally:
            for door, was in zip(self.doors, before):
                beside[door.name] = door.taken(was)
                if door.copies_arguments and (path := was.path_of(output)) is not None:
                    beside[_RETURNED] = path
        return SideOutput(output, beside)


def through(plain: Callable[..., Any], output: Any, arguments: Any) -> Any:
    """Return the output of a call with these arguments, with its side effects put in their places."""
    if not isinstance(output, SideOutput):
        return output
    assert isinstance(plain, Doorway)
    for door in plain.doors:
        door.put(output.beside[door.name], arguments)
    if _RETURNED in output.beside:
        return container_at(arguments, output.beside[_RETURNED])
    return output.output
