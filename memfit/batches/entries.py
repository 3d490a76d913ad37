"""The entries of the containers in a tree, to see what code changes there, to undo it, or to change another tree likewise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributions.utils import lazy_property

from memfit.batches.tree import AttributeKey, Path, children, container_at, entries_of

REMOVED: Any = object()
"""Instead of an entry that is gone."""


class Entries:
    """The entries of the containers in a tree as they are now."""

    def __init__(self, tree: Any) -> None:
        self._nodes = list(_nodes(tree, (), set()))
        self.containers = {id(node) for _, node, _ in self._nodes}

    def path_of(self, container: Any) -> Path | None:
        """Return where this container is in the tree."""
        return next((path for path, node, _ in self._nodes if node is container), None)

    def changed(self) -> list[tuple[Path, Any]]:
        """Return the paths of entries that are new, other objects or REMOVED, with what is there now."""
        return [((*path, key), value) for path, node, before in self._nodes for key, value in _changed(node, before)]

    def restore(self) -> None:
        """Put back what was there."""
        for _, node, before in self._nodes:
            for key, _ in _changed(node, before):
                if key not in before:
                    _put(node, key, REMOVED)
            for key, value in before.items():
                if entries_of(node).get(key, REMOVED) is not value:
                    _put(node, key, value)


@contextmanager
def also_in(script: Any, own: Any) -> Iterator[None]:
    """Context of a forward over `own` arguments: what it changes in their containers is put into the script's own, too."""
    entries = None if own is script else Entries(own)
    yield
    if entries is not None:
        put_entries(entries.changed(), script)


def put_entries(entries: Sequence[tuple[Path, Any]], arguments: Any) -> None:
    """Put values at paths of these arguments, or remove what is there."""
    owners = [container_at(arguments, path[:-1]) for path, _ in entries]
    for owner, (path, value) in zip(owners, entries):
        _put(owner, path[-1], value)


def _nodes(node: Any, path: Path, met: set[int]) -> Iterator[tuple[Path, Any, dict[Any, Any]]]:
    if ((parts := children(node)) is None and type(node) is not list) or id(node) in met:
        return
    met.add(id(node))
    yield path, node, entries_of(node)
    for key, part in parts or ():
        yield from _nodes(part, (*path, key), met)


def _changed(node: Any, before: dict[Any, Any]) -> list[tuple[Any, Any]]:
    now = entries_of(node)
    new = [(key, value) for key, value in now.items() if value is not before.get(key, REMOVED) and not _is_cache(node, key)]
    return new + [(key, REMOVED) for key in reversed(before) if key not in now]


def _is_cache(node: Any, key: Any) -> bool:
    """Whether an object's class computes this attribute when it is first read."""
    if not isinstance(key, AttributeKey):
        return False
    return isinstance(inspect.getattr_static(type(node), key, None), (functools.cached_property, lazy_property))


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, (list, MutableMapping)) and not isinstance(key, AttributeKey):
        if value is REMOVED:
            del owner[key]
        elif isinstance(owner, list) and key >= len(owner):
            owner.append(value)
        else:
            owner[key] = value
    elif value is REMOVED:  # as the tree is read and copied, past frozen dataclasses and guards of classes
        object.__delattr__(owner, key)
    else:
        object.__setattr__(owner, key, value)
