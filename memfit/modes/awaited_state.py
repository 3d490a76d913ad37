"""State that a forward leaves without a graph (`self.mask = ...`), for a script that reads it before that forward has run.

A descriptor in the module's class watches the attribute: who reads or sets it runs the calls that wait first. What is held
elsewhere (global variables, closures of hooks) cannot be watched, so such calls run at once.
Not covered: parameters that a forward writes (a momentum encoder's), containers in a module's attribute that the script also
holds under a name of its own, `state_dict()` and the like.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit.engine.modules import modules_of, parameters_in
from memfit.engine.places import MISSING, ItemPlace, Place, TensorPlace, WithoutGraph
from memfit.engine.version_checks import key_of

Attribute = tuple[nn.Module, str]
DEEPEST = 4
"""Containers inside containers up to which an attribute is searched for a place."""


class AwaitedState:
    """Watches attributes of `model` until the calls that write them have run. `run` runs them; while `is_busy`, memfit itself
    runs the model."""

    def __init__(self, model: nn.Module, run: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        self._model, self._run, self._is_busy = model, run, is_busy
        self._known: tuple[Sequence[Place], list[Attribute] | None] = ((), [])
        self._installed: list[_Watched] = []

    def watch(self, moved: Iterable[Sequence[Place]]) -> bool:
        """Watch exactly these places from now on. Returns False, with nothing watched, if one of them cannot be watched."""
        self.release()
        by_kind: dict[tuple[type, str], list[nn.Module]] = {}
        for places in moved:
            attributes = self._attributes_of(places)
            if attributes is None:
                return False
            for module, name in attributes:
                by_kind.setdefault((type(module), name), []).append(module)
        try:
            for (kind, name), modules in by_kind.items():
                self._installed.append(_Watched(kind, name, modules, self._about_to_use))
        except (TypeError, AttributeError):  # a class that takes no attributes
            self.release()
            return False
        return True

    def release(self) -> None:
        """Stop watching."""
        for watched in reversed(self._installed):
            watched.remove()
        self._installed = []

    def _about_to_use(self) -> bool:
        """Run what waits, for the script. Returns whether it did."""
        if self._is_busy():
            return False
        self.release()
        self._run()
        return True

    def _attributes_of(self, places: Sequence[Place]) -> list[Attribute] | None:
        """The attributes that hold these places; None if one is held elsewhere. Cached for the latest places."""
        if self._known[0] is not places:
            modules = modules_of(self._model)
            held = {id(table): module for module in modules for table in (module.__dict__, module._buffers)}
            parameters = {key_of(parameter) for parameter in parameters_in(modules)}
            written = [place for place in places if _inside(place) not in parameters]
            found = [_direct(place, held) for place in written]
            if None in found:
                within = dict(_contents(modules))
                found = [direct or within.get(_inside(place)) for place, direct in zip(written, found)]
            self._known = places, None if None in found else [each for each in found if each is not None]
        return self._known[1]


class _Watched:
    """Stands for attribute `name` in class `kind`, for these modules. `about_to_use` returns whether it removed this."""

    def __init__(self, kind: type, name: str, modules: Sequence[nn.Module], about_to_use: Callable[[], bool]) -> None:
        self._kind, self._name, self._about_to_use = kind, name, about_to_use
        self._modules = frozenset(map(id, modules))
        self._before = vars(kind).get(name, MISSING)
        setattr(kind, name, self)

    def remove(self) -> None:
        """Restore what the class had there."""
        if vars(self._kind).get(self._name) is not self:
            return
        if self._before is MISSING:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._before)

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is not None and id(module) in self._modules and self._about_to_use():
            return getattr(module, self._name)
        return self._unwatched(module, kind or self._kind)

    def __set__(self, module: nn.Module, value: Any) -> None:
        if id(module) in self._modules and self._about_to_use():
            setattr(module, self._name, value)
        else:
            module.__dict__[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        if id(module) in self._modules and self._about_to_use():
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
