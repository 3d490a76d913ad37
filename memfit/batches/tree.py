"""Flattens nested batches and outputs into a list of leaves, and rebuilds them (like torch's pytree).

Supported containers: tuples, named tuples, lists, mappings (including `UserDict`s such as transformers' BatchEncoding, and
`ModelOutput`s), dataclasses, distributions, and objects of the script's own classes with tensors as attributes. Everything
else is a leaf. Not covered: objects that hold such objects in turn, or that hold tensors in other ways (graph batches,
caches). They are leaves, and cutting refuses leaves it does not know.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memfit._errors import Refused

Path = tuple[str | int, ...]
_LIBRARIES = {"torch", "transformers", "memfit"}
"""Libraries whose objects are never containers because of tensors in their attributes."""


class AttributeKey(str):
    """The name of a part that is an attribute of an object of the script's own class."""

    __slots__ = ()


def children(node: Any) -> list[tuple[str | int, Any]] | None:
    """Return the named parts of a container, or None for a leaf."""
    if type(node) is dict:
        return list(node.items())
    if isinstance(node, torch.Tensor) or is_column(node):
        return None
    if isinstance(node, (tuple, list)):
        return list(enumerate(node))
    if isinstance(node, (Mapping, UserDict)):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [
            (field.name, getattr(node, field.name)) for field in dataclasses.fields(node) if hasattr(node, field.name)
        ]
    if isinstance(node, torch.distributions.Distribution):
        return [(AttributeKey(name), value) for name, value in vars(node).items()]
    if _is_holder(node) and not any(_leads_to_holders(value) for value in vars(node).values()):
        return [(AttributeKey(name), value) for name, value in vars(node).items()]
    return None


def _is_holder(node: Any) -> bool:
    """Whether `node` is an object of the script's own class with tensors as attributes."""
    held = getattr(node, "__dict__", None)
    if type(held) is not dict or isinstance(node, (type, torch.nn.Module)) or callable(node):
        return False
    if not any(isinstance(value, torch.Tensor) for value in held.values()):
        return False
    return not any(kind.__module__.split(".")[0] in _LIBRARIES for kind in type(node).__mro__)


def _leads_to_holders(value: Any) -> bool:
    """Whether `value` is or contains such objects, which may form reference cycles."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
    return any(not isinstance(item, torch.Tensor) and _is_holder(item) for item in items)


def is_column(node: Any) -> bool:
    """Whether `node` is a list of texts, one per sample, as default collation of strings returns it, or a list of numbers. It
    is one leaf, cut by slicing. A tuple of numbers such as (height, width) is not."""
    if type(node) not in (list, tuple) or not node:
        return False
    if isinstance(node[0], (str, bytes)):
        return all(isinstance(item, (str, bytes)) for item in node)
    return type(node) is list and all(type(item) in (int, float) for item in node)


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf of `tree` with its path, depth first in the containers' own order."""
    parts = children(tree)
    if parts is None:
        yield path, tree
        return
    for name, part in parts:
        yield from leaves(part, (*path, name))


def flat(tree: Any) -> list[Any]:
    """Return the leaves without paths."""
    parts = children(tree)
    return [tree] if parts is None else [leaf for _, part in parts for leaf in flat(part)]


def leaf_at(tree: Any, path: Path) -> Any:
    """Return the leaf at this path of `leaves`, or None."""
    for name in path:
        tree = dict(children(tree) or ()).get(name)
    return tree


def builder(tree: Any) -> Callable[[Iterator[Any]], Any]:
    """Return a function that copies the containers of `tree` and takes the leaves from an iterator, in `leaves` order. A
    container that is there more than once is so in the copy."""
    shared = shared_containers(tree)
    made: dict[int, Any] = {}
    build = _builder(tree, shared, made)
    if not shared:
        return build

    def build_shared(values: Iterator[Any]) -> Any:
        made.clear()
        try:
            return build(values)
        finally:
            made.clear()

    return build_shared


def shared_containers(tree: Any) -> set[int]:
    """Return the ids of containers that are in the tree more than once."""
    met: set[int] = set()
    shared: set[int] = set()
    open_ = [tree]
    while open_:
        node = open_.pop()
        parts = children(node)
        if parts is None:
            continue
        if id(node) in met and type(node) is not tuple:
            shared.add(id(node))
            continue
        met.add(id(node))
        open_ += [part for _, part in parts]
    return shared


def _builder(tree: Any, shared: set[int], made: dict[int, Any]) -> Callable[[Iterator[Any]], Any]:
    parts = children(tree)
    if parts is None:
        return next
    names, builders = [name for name, _ in parts], [_builder(part, shared, made) for _, part in parts]
    if type(tree) is tuple:
        return lambda values: tuple([build(values) for build in builders])
    if id(tree) not in shared:
        return lambda values: _with_parts(tree, [build(values) for build in builders], names)

    def build_once(values: Iterator[Any]) -> Any:
        built = [build(values) for build in builders]
        return made[id(tree)] if id(tree) in made else made.setdefault(id(tree), _with_parts(tree, built, names))

    return build_once


def rebuild(tree: Any, values: Iterator[Any]) -> Any:
    """Copy the containers of `tree`, with leaves from `values` in the order of `leaves`."""
    return builder(tree)(values)


def first_same(found: Sequence[Any]) -> list[int]:
    """Return for each leaf the first one that is the same tensor: a forward may ask whether its query is its key. What is one
    tensor is cut alike."""
    met: dict[int, int] = {}
    return [met.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i for i, leaf in enumerate(found)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of `tree`. Containers keep their types."""
    return rebuild(tree, map(function, flat(tree)))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Apply `function` once to every tensor of `tree`. What is one tensor stays one: a forward may ask whether its query is its
    key."""
    made: dict[int, torch.Tensor] = {}

    def mapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = function(leaf)
        return made[id(leaf)]

    return map_leaves(mapped, tree)


def entries_of(node: Any) -> dict[Any, Any]:
    """Return the entries of a container, other attributes of dataclasses and items of lists of texts or numbers included."""
    if dataclasses.is_dataclass(node) and not isinstance(node, Mapping):
        return dict(vars(node)) if hasattr(node, "__dict__") else dict(children(node) or ())
    return dict(enumerate(node)) if type(node) is list else dict(children(node) or ())


def container_at(tree: Any, path: Sequence[Any]) -> Any:
    """Return what is at this path of `entries_of`."""
    for key in path:
        tree = entries_of(tree)[key]
    return tree


def with_new_containers(tree: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a tree of the same leaves whose containers are copies, lists of texts or numbers included."""
    copies = {} if copies is None else copies
    parts = children(tree)
    if id(tree) not in copies and (parts is not None or type(tree) is list):
        copies[id(tree)] = _with_new_containers(tree, parts, copies)
    return copies.get(id(tree), tree)


def _with_new_containers(tree: Any, parts: list[tuple[str | int, Any]] | None, copies: dict[int, Any]) -> Any:
    if parts is None:
        return list(tree)
    if isinstance(tree, Mapping) and not hasattr(type(tree), "__setitem__"):
        return tree
    names, made = [name for name, _ in parts], [with_new_containers(part, copies) for _, part in parts]
    return _with_parts(copy.copy(tree) if names and isinstance(names[0], AttributeKey) else tree, made, names)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves."""
    return [leaf for leaf in flat(tree) if isinstance(leaf, torch.Tensor)]


def path_name(path: Path, root: str = "batch") -> str:
    """Format a path as Python code: batch['labels'][0], or batch.labels."""
    return root + "".join(f".{name}" if isinstance(name, AttributeKey) else f"[{name!r}]" for name in path)


def _with_parts(node: Any, parts: list[Any], names: list[str | int]) -> Any:
    if isinstance(node, tuple):
        return type(node)(*parts) if hasattr(node, "_fields") else _tuple_like(node, parts)
    if isinstance(node, list):
        return parts if type(node) is list else _list_like(node, parts)
    if type(node) is dict:
        return dict(zip(names, parts))
    if dataclasses.is_dataclass(node):
        return _with_fields(node, dict(zip(names, parts)))
    if names and isinstance(names[0], AttributeKey):
        return _with_attributes(node, dict(zip(names, parts)))
    return _with_items(node, dict(zip(names, parts)))


_IS_PYTHONS = 1 << 9
"""Flag of types that are made in Python (`Py_TPFLAGS_HEAPTYPE`)."""


def _tuple_like(node: Any, parts: list[Any]) -> Any:
    """A constructor of a subclass may take other arguments."""
    if type(node) is tuple or type(node) is torch.Size:
        return tuple(parts) if type(node) is tuple or not all(type(part) is int for part in parts) else torch.Size(parts)
    if not type(node).__flags__ & _IS_PYTHONS:  # torch.return_types
        return type(node)(parts)
    made: Any = tuple.__new__(type(node), parts)
    getattr(made, "__dict__", {}).update(getattr(node, "__dict__", {}))
    return made


def _list_like(node: Any, parts: list[Any]) -> Any:
    made = copy.copy(node)
    made[:] = parts
    return made


def _with_fields(node: Any, values: dict[Any, Any]) -> Any:
    twin = copy.copy(node)
    for name, value in values.items():
        object.__setattr__(twin, name, value)
    if isinstance(twin, dict):
        # ModelOutput keeps its items both as attributes and as dictionary entries, without those that are None. A copy of one
        # whose leaves are None has lost their places, which `output[0]` and unpacking go by.
        base: Any = OrderedDict if isinstance(twin, OrderedDict) else dict
        for name in list(base.keys(twin)):
            base.__delitem__(twin, name)
        for name, value in values.items():
            base.__setitem__(twin, name, value)
    return twin


def _with_attributes(node: Any, values: dict[Any, Any]) -> Any:
    held = vars(node)
    if all(value is held[name] for name, value in values.items()):
        return node
    twin = copy.copy(node)
    vars(twin).update({str(name): value for name, value in values.items()})
    return twin


def _with_items(node: Any, values: dict[Any, Any]) -> Any:
    if not hasattr(type(node), "__setitem__"):
        return node if all(value is node[name] for name, value in values.items()) else _read_only_like(node, values)
    twin = copy.copy(node)
    if getattr(node, "__dict__", None) is node:  # entries are attributes, too
        twin.__dict__ = twin
    for name, value in values.items():
        twin[name] = value
    return twin


def _read_only_like(node: Any, values: dict[Any, Any]) -> Any:
    try:
        return type(node)(values)
    except TypeError as error:
        raise Refused(
            "cutting a batch into micro-batches",
            found=f"it is a read-only {type(node).__name__}, which cannot be made from a dictionary",
            next_move="pass a dict",
        ) from error


def copied_tensors(tree: Any) -> Any:
    """Return a tree whose tensors are copies that may be written into."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), tree)
