"""Entries that a forward sets or removes in the containers among its arguments: `batch["x"] = batch["x"] / 255`.

Every micro-batch has containers of its own. What its forward changes there is joined like an output, and put into the script's
containers. Not covered: attributes of other objects, which `find_side_outputs` refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from memfit.batches.tree import AttributeKey, Path, children, path_name, with_new_containers
from memfit.capture.outputs import Named
from memfit.capture.side_outputs import Door

_REMOVED: Any = object()


class ArgumentEntries(Door):
    """The door that all such entries of a call leave by."""

    copies_arguments = True

    def __init__(self) -> None:
        super().__init__("an entry of the arguments", {}, "")
        self._paths: dict[str, tuple[Path, bool]] = {}

    def before(self, arguments: Any) -> Any:
        return Entries(arguments)

    def taken(self, before: Any) -> dict[str, Any]:
        found = {}
        for path, value in before.changed():
            gone = value is _REMOVED
            name = Named(path_name(path[1:], "arguments") + (" (removed)" if gone else ""))
            self._paths[name] = path, gone
            found[name] = None if gone else value
        return found

    def put(self, value: Any, arguments: Any) -> None:
        for name, item in value.items():
            (*outer, key), removed = self._paths[name]
            owner = arguments
            for step in outer:
                owner = _entries(owner)[step]
            if removed:
                _remove(owner, key)
            else:
                _set(owner, key, with_new_containers(item))


class Entries:
    """The entries of the containers in a tree as they are now."""

    def __init__(self, tree: Any) -> None:
        self._nodes = list(_nodes(tree, ()))
        self.containers = {id(node) for _, node, _ in self._nodes}

    def changed(self) -> list[tuple[Path, Any]]:
        """Return the paths of entries that are new, other objects or removed, with what is there now."""
        found = []
        for path, node, before in self._nodes:
            now = _entries(node)
            found += [((*path, key), value) for key, value in now.items() if value is not before.get(key, _REMOVED)]
            found += [((*path, key), _REMOVED) for key in reversed(before) if key not in now]
        return found


def _nodes(node: Any, path: Path) -> Iterator[tuple[Path, Any, dict[Any, Any]]]:
    if (parts := children(node)) is None and type(node) is not list:
        return
    yield path, node, _entries(node)
    for key, part in parts or ():
        yield from _nodes(part, (*path, key))


def _entries(node: Any) -> dict[Any, Any]:
    if dataclasses.is_dataclass(node) and not isinstance(node, Mapping):
        return dict(vars(node)) if hasattr(node, "__dict__") else dict(children(node) or ())
    return dict(enumerate(node)) if type(node) is list else dict(children(node) or ())


def _set(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, list) and key >= len(owner):
        owner.append(value)
    elif isinstance(owner, (list, MutableMapping)) and not isinstance(key, AttributeKey):
        owner[key] = value
    else:
        setattr(owner, key, value)


def _remove(owner: Any, key: Any) -> None:
    if isinstance(owner, (list, MutableMapping)) and not isinstance(key, AttributeKey):
        del owner[key]
    else:
        delattr(owner, key)
