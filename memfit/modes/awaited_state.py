"""State that a forward leaves without a graph (`self.mask = ...`), for a script that reads it before that forward has run.

A descriptor in the module's class watches the attribute: who reads or sets it runs the calls that wait first. What is held
elsewhere (global variables, closures of hooks) cannot be watched, so such calls run at once.
Not covered: tensors and containers of a module that the script also holds under a name of its own; running statistics of
torch's own batch norms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import getattr_static
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import nn

from memfit.engine.modules import modules_of
from memfit.engine.places import MISSING, ItemPlace, Place, TensorPlace, WithoutGraph
from memfit.engine.version_checks import key_of

Attribute = tuple[nn.Module, str]
LISTS = {
    "_parameters": ("parameters", "named_parameters", "state_dict"),
    "_buffers": ("buffers", "named_buffers", "state_dict"),
}
"""Methods of modules by which a script gets at parameters and buffers."""
DEEPEST = 4
"""Containers inside containers up to which an attribute is searched for a place."""


class AwaitedState:
    """Watches attributes of `model` until the calls that write them have run. `run` runs them; while `is_busy`, memfit itself
    runs the model."""

    def __init__(self, model: nn.Module, run: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        self._model, self._run, self._is_busy = model, run, is_busy
        self._known: tuple[Sequence[Place], list[Attribute] | None] = ((), [])
        self._installed: list[tuple[_AwaitedAttribute, ref[nn.Module]]] = []

    def watch(self, moved: Iterable[Sequence[Place]]) -> bool:
        """Watch exactly these places from now on. Returns False, with nothing watched, if one of them cannot be watched."""
        self.release()
        for places in moved:
            attributes = self._attributes_of(places)
            try:
                for module, name in attributes or ():
                    watched = _watched(type(module), name)
                    watched.users.setdefault(module, []).append(WeakMethod(self._about_to_use))
                    self._installed.append((watched, ref(module)))
            except (TypeError, AttributeError):  # a property, or a class that takes no attributes
                attributes = None
            if attributes is None:
                self.release()
                return False
        return True

    def release(self) -> None:
        """Stop watching."""
        for watched, known in self._installed:
            watched.forget(known(), self._about_to_use)
        self._installed = []

    def _about_to_use(self) -> bool:
        """Run what waits, for the script. Returns whether it did."""
        if self._is_busy():
            return False
        self.release()
        self._run()
        return True

    def _attributes_of(self, places: Sequence[Place]) -> list[Attribute] | None:
        """The attributes that lead to these places; None if one is held elsewhere. Cached for the latest places."""
        if self._known[0] is not places:
            modules = modules_of(self._model)
            held = {id(table): module for module in modules for table in (module.__dict__, module._buffers)}
            found = [_direct(place, held) for place in places]
            if None in found:
                within = {**dict(_contents(modules)), **dict(_parameters(modules))}
                found = [direct or within.get(_inside(place)) for place, direct in zip(places, found)]
            own = [each for each in found if each is not None]
            lists = [
                (module, name)
                for kind, names in LISTS.items()
                for module in _that_hold(self._model, [m for m, name in own if name in vars(m)[kind]])
                for name in names
            ]
            self._known = places, None if None in found else [*own, *lists]
        return self._known[1]


class _AwaitedAttribute:
    """Stands for an attribute in a class. `users`: by module, what is called before its attribute is used, and returns whether
    that changed anything. Modules are not kept alive."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self.users: WeakKeyDictionary[nn.Module, list[WeakMethod[Callable[[], bool]]]] = WeakKeyDictionary()
        self._before = vars(kind).get(name, MISSING)
        setattr(kind, name, self)

    def forget(self, module: nn.Module | None, use: Callable[[], bool]) -> None:
        """Call `use` no longer for this module. Restores what the class had there if nothing is left to call."""
        if module is not None and module in self.users:
            left = [each for each in self.users.pop(module) if each() not in (None, use)]
            if left:
                self.users[module] = left
        if self.users or vars(self._kind).get(self._name) is not self:
            return
        if self._before is MISSING:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._before)

    def _is_used(self, module: nn.Module) -> bool:
        """Whether something ran because this module's attribute is about to be used."""
        users = [each() for each in self.users.get(module, ())]
        return any([use() for use in users if use is not None])

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is not None and self._is_used(module):
            return getattr(module, self._name)
        return self._unwatched(module, kind or self._kind)

    def __set__(self, module: nn.Module, value: Any) -> None:
        if self._is_used(module):
            setattr(module, self._name, value)
        else:
            module.__dict__[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        if self._is_used(module):
            delattr(module, self._name)
        elif module.__dict__.pop(self._name, MISSING) is MISSING:
            raise AttributeError(self._name)

    def _unwatched(self, module: nn.Module | None, kind: type) -> Any:
        """What would be found if this was not here."""
        if module is not None and self._name in module.__dict__:
            return module.__dict__[self._name]
        inherited = (vars(base)[self._name] for base in kind.__mro__ if vars(base).get(self._name, self) is not self)
        found = next(inherited, MISSING) if self._before is MISSING else self._before
        if found is not MISSING:
            bind = getattr(type(found), "__get__", None)
            return found if bind is None else bind(found, module, kind)
        if module is None:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self._name!r}")
        return kind.__getattr__(module, self._name)  # type: ignore[attr-defined]  # torch's own, for buffers


def _watched(kind: type, name: str) -> _AwaitedAttribute:
    """What watches an attribute of this class, now installed. Raises TypeError for a property, whose values are its own."""
    there = vars(kind).get(name)
    if isinstance(there, _AwaitedAttribute):
        return there
    if hasattr(type(getattr_static(kind, name, None)), "__set__"):
        raise TypeError(f"{name} of {kind.__name__} is computed")
    return _AwaitedAttribute(kind, name)


def _direct(place: Place, held: dict[int, nn.Module]) -> Attribute | None:
    """The attribute that is this place."""
    place = place.place if isinstance(place, WithoutGraph) else place
    module = held.get(id(place.holder)) if isinstance(place, ItemPlace) else None
    return None if module is None else (module, place.name)  # type: ignore[union-attr]


def _inside(place: Place) -> Any:
    """What `_contents` lists the holder of a place by."""
    place = place.place if isinstance(place, WithoutGraph) else place
    if isinstance(place, TensorPlace):
        return key_of(place.tensor)
    return next((id(getattr(place, name)) for name in ("holder", "container", "array") if hasattr(place, name)), None)


def _contents(modules: Sequence[nn.Module]) -> Iterator[tuple[Any, Attribute]]:
    """Yield each container, object, array and tensor in the attributes of these modules, with the attribute."""
    own = frozenset(nn.Module().__dict__)
    for module in modules:
        for name, value in (*module.__dict__.items(), *module._buffers.items()):
            for key in () if name in own else _keys_in(value, DEEPEST):
                yield key, (module, name)


def _parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[Any, Attribute]]:
    """Yield each parameter as `_inside` names it, with the attribute."""
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield key_of(parameter), (module, name)


def _that_hold(model: nn.Module, owners: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are or contain one of these."""
    own, found = set(map(id, owners)), dict[int, bool]()

    def visit(module: nn.Module) -> bool:
        if id(module) not in found:
            found[id(module)] = id(module) in own
            found[id(module)] |= any([visit(child) for child in module._modules.values() if child is not None])
        return found[id(module)]

    return [module for module in modules_of(model) if own and visit(module)]


def _keys_in(value: Any, deep: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield key_of(value)
        return
    if value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)) or callable(value):
        return
    yield id(value)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield id(attributes)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set, deque)) else ()
    for item in (*items, *(attributes.values() if isinstance(attributes, dict) else ())) if deep else ():
        yield from _keys_in(item, deep - 1)
