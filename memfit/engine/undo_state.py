"""Undoes side effects of user code on Python objects after planning. Objects keep their identity; contents are restored.

Planning runs the model, its hooks and the loss on few samples and fake tensors. One walk visits all they can reach:
attributes, containers of any depth, closure variables, partials, bound methods, and globals and class attributes named in user
code. The write guard restores the values of tensors, and iterators are rewound (`engine/rewindable.py`). Not covered: files,
other processes, datasets, state in extensions, and objects of installed packages that hold more than data (loggers, trackers).
"""

from __future__ import annotations

import array
import enum
import functools
import queue
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memfit.engine.places import (
    LONG,
    MISSING,
    SIMPLE,
    ArrayPlace,
    AttributePlace,
    BytesPlace,
    Place,
    VariablePlace,
    put_back,
    refilled,
)
from memfit.engine.random_state import is_generator, read_generator, remember_generators, write_generator
from memfit.engine.rewindable import Rewound, go_back, only_draws, position_of, rewinding, untouched
from memfit.engine.state_changes import (
    CONTAINERS,
    OF_MODULES,
    SHARED,
    added_to,
    holds_data,
    is_data,
    moved_array,
    moved_attribute,
    moved_bytes,
    moved_contents,
    moved_data,
    moved_entries,
    moved_global,
    moved_position,
    moved_variable,
    place_of,
)
from memfit.engine.user_code import is_installed, names_in, slots_of

MOST = 200_000
"""Maximum number of objects visited."""
MADE_LATER = ("_parameters", "_buffers", "_modules")
"""What a forward of the script's own module may fill first."""
LARGE = 64 << 20
"""Maximum bytes of a NumPy array that is copied."""
MEMO: type = type(functools.lru_cache(id))
Undo = Callable[[], object]


class UndoState:
    """All objects reached, and how to restore them. `names` maps ids of attribute dictionaries to module names."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names_of = names
        self._no_state: set[int] = set()
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._held: list[torch.Tensor] = []
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._undo: list[Undo] = []
        self._unwrap: list[Undo] = []
        self._open: deque[Any] = deque()
        # Partials hold the objects, so that a search for whatever refers to a container does not find this list.
        self._alive: list[functools.partial[Any]] = []
        self._watches: list[Callable[[], list[tuple[Place, Any]]]] = []

    def look(self, roots: Iterable[Any]) -> None:
        """Visit everything these roots reach."""
        self._open.extend(roots)
        while self._open and len(self._seen) < MOST:
            value = self._open.popleft()
            if type(value) not in SIMPLE and id(value) not in self._seen:
                self._seen.add(id(value))
                self._alive.append(functools.partial(id, value))
                self._one(value)
        self._open.clear()

    def undo(self, *, iterators: bool = True) -> None:
        """Restore everything; raises the first error at the end. `iterators`: also unwrap those never drawn from."""
        failed: BaseException | None = None
        for undo in (*reversed(self._undo), *(reversed(self._unwrap) if iterators else ())):
            try:
                undo()
            except Exception as error:
                failed = failed or error
        self._undo, self._unwrap, self._alive, self._watches = [], [], [], []
        if failed is not None:
            raise failed

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of a buffer or parameter of the model."""
        storage = tensor.untyped_storage()._cdata
        return next((name for name, own in self._tensors if own.untyped_storage()._cdata == storage), "a tensor")

    def holder_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the visited tensor at the same place, which keeps the state if `.data` is assigned; else `tensor`."""
        place = place_of(tensor)
        return next((held for held in self._held if place_of(held) == place), tensor)

    def small_tensors(self) -> list[torch.Tensor]:
        """Return the visited tensors of at most `LARGE` bytes that require no gradient."""
        return [t for t in self._held if not t.requires_grad and t.untyped_storage().nbytes() <= LARGE]

    def visited(self) -> list[Any]:
        """Return the visited objects."""
        return [alive.args[0] for alive in self._alive]

    def watches(self) -> list[Callable[[], list[tuple[Place, Any]]]]:
        """Return functions that tell (place, old value) of what changed since the visit. They outlive `undo`."""
        return list(self._watches)

    def moved(self) -> list[tuple[Place, Any]]:
        """Return (place, old value) of all that changed."""
        return [move for watch in self._watches for move in watch()]

    def _watch(self, moved: Callable[..., list[tuple[Place, Any]]], *given: Any) -> None:
        self._watches.append(functools.partial(moved, *given))

    def _one(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            owner = self._names_of.get(id(value.__dict__), type(value).__name__)
            for name, tensor in (*value._parameters.items(), *value._buffers.items()):
                if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
                    self._tensors.append((f"{owner}.{name}".lstrip("."), tensor))
            self._no_state.update(id(value.__dict__.get(name)) for name in OF_MODULES if name != "_buffers")
            self._names_of.setdefault(id(value._buffers), owner)
            self._attributes(value)
            self._class(type(value))
        elif isinstance(value, CONTAINERS):
            self._container(value)
        elif isinstance(value, (tuple, frozenset)):
            self._open.extend(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, MEMO):
            self._memo(value)
        elif isinstance(value, functools.partial):
            self._rewindable(functools.partial(_set_arguments, value), value.args)
            self._open.extend((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._open.extend((value.__self__, value.__func__))
        elif isinstance(value, types.BuiltinMethodType):
            self._open.extend(() if isinstance(value.__self__, (types.ModuleType, type(None))) else (value.__self__,))
        elif isinstance(value, types.CellType):
            self._cell(value)
        elif isinstance(value, Rewound):
            self._iterator(value)
        elif isinstance(value, (bytearray, array.array)):
            place, items = BytesPlace(value, "an array"), value[:]
            self._undo.append(functools.partial(place.put, items))
            self._watch(moved_bytes, place, items)
        elif isinstance(value, queue.Queue):
            self._open.append(value.queue)
        elif is_generator(value) or type(value).__module__.startswith("numpy"):
            self._state(value)
        elif not isinstance(value, (*SHARED, types.ModuleType)) and not only_draws(value):
            self._object(value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        """Watch its data (`p.data = ...`) and its gradient."""
        if hasattr(tensor, "to_local") or tensor.layout is not torch.strided or not tensor.is_leaf or tensor.is_nested:
            return
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return
        self._held.append(tensor)
        data, gradient = tensor.detach(), tensor.grad
        self._watch(moved_data, tensor, data, place_of(data), self.name_of)

        def undo() -> None:
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if place_of(tensor) != place_of(data):
                tensor.data = data

        self._undo.append(undo)

    def _iterator(self, rewound: Rewound) -> None:
        """Watch its position."""
        position, rehearsing = position_of(rewound), rewound.rehearsing
        rewound.rehearsing = True

        def undo() -> None:
            go_back(rewound, position)
            rewound.rehearsing = rehearsing

        self._undo.append(undo)
        self._watch(moved_position, rewound, position)

    def _rewindable(self, put: Callable[[Any], object], value: Any) -> Any:
        """Make the iterators in a value rewindable and store the result with `put`. Iterators that were never drawn from are
        unwrapped at the end."""
        found: list[Rewound] = []
        made = rewinding(value, found)
        if not found:
            return value
        put(made)

        def undo() -> None:
            if all(untouched(rewound) is not None for rewound in found):
                put(value)

        self._unwrap.append(undo)
        return made

    def _rewindable_entries(self, holder: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for name, value in [(name, value) for name, value in items if type(value) not in SIMPLE]:
            self._rewindable(functools.partial(holder.__setitem__, name), value)

    def _container(self, container: Any) -> None:
        if isinstance(container, dict):
            self._rewindable_entries(container, container.items())
        elif not isinstance(container, set) and len(container) <= LONG:
            self._rewindable_entries(container, enumerate(container))
        items = container.copy()
        self._undo.append(lambda: refilled(container, items))
        if isinstance(container, dict):
            if id(container) not in self._no_state:
                self._watch(moved_entries, container, items, self._names_of.get(id(container), "a dictionary"))
        elif isinstance(container, (list, deque)):
            self._watch(moved_contents, container, items, "a list")
        if len(items) <= LONG:
            self._open.extend(items.values() if isinstance(items, dict) else items)
        if type(container) not in (*CONTAINERS, OrderedDict) and not is_installed(type(container).__module__):
            self._attributes(container)

    def _function(self, function: types.FunctionType) -> None:
        self._rewindable(functools.partial(setattr, function, "__defaults__"), function.__defaults__)
        self._open.extend((function.__closure__, function.__defaults__, function.__kwdefaults__))
        if function.__dict__:
            self._open.append(function.__dict__)
        if not is_installed(function.__globals__.get("__name__")):
            self._names(function.__globals__, names_in(function.__code__))

    def _memo(self, function: Any) -> None:
        """Forget what `functools.lru_cache` keeps of planning, such as fake tensors. It can only forget everything."""
        misses = function.cache_info().misses
        self._undo.append(lambda: None if function.cache_info().misses == misses else function.cache_clear())
        self._open.append(function.__wrapped__)

    def _cell(self, cell: types.CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # unassigned
            return

        value = self._rewindable(VariablePlace(cell, "a variable").put, value)

        def undo() -> None:
            cell.cell_contents = value

        self._undo.append(undo)
        self._watch(moved_variable, cell, value)
        self._open.append(value)

    def _names(self, known: dict[str, Any], names: Iterable[str]) -> None:
        """Visit globals that code names, and the data in user modules that it names."""
        for name in names:
            value = known.get(name)
            if value is None and name not in known:
                continue
            if isinstance(value, types.ModuleType):
                self._module(value)
            elif isinstance(value, type):
                self._class(value)
            else:
                value = self._rewindable(functools.partial(known.__setitem__, name), value)
                self._undo.append(functools.partial(_rebound, known, name, value))
                self._watch(moved_global, known, name, value)
                self._open.append(value)

    def _module(self, module: types.ModuleType) -> None:
        if id(module) in self._seen or is_installed(module.__name__):
            return
        self._seen.add(id(module))
        self._names(module.__dict__, [name for name, value in module.__dict__.items() if is_data(name, value)])

    def _object(self, value: Any) -> None:
        kind = type(value)
        if not is_installed(kind.__module__) or holds_data(value):
            self._attributes(value)
            self._class(kind)

    def _attributes(self, value: Any) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._rewindable_entries(own, own.items())
            items = dict(own)
            self._undo.append(lambda: put_back(own, items))
            self._watch(moved_entries, own, items, self._names_of.get(id(own), type(value).__name__))
            may_grow = () if is_installed(type(value).__module__) else MADE_LATER
            self._open.extend(item for name, item in items.items() if name not in OF_MODULES or item or name in may_grow)
            if isinstance(value, nn.Module):
                empty = [table for name in OF_MODULES if isinstance(table := items.get(name), dict) and not table]
                self._undo.append(lambda: [table.clear() for table in empty if table])
        for name in slots_of(type(value)):
            self._attribute(AttributePlace(value, name, f"{type(value).__name__}.{name}"))

    def _attribute(self, place: AttributePlace) -> None:
        """Visit an attribute of a class or in a slot."""
        item = self._rewindable(place.put, place.value())
        self._undo.append(functools.partial(_set_again, place, item))
        self._watch(moved_attribute, place, item)
        self._open.append(item)

    def _class(self, kind: type) -> None:
        """Visit counters and registries on user classes, and what their methods name."""
        for base in kind.__mro__:
            if base in self._classes or is_installed(base.__module__) or issubclass(base, enum.Enum):
                continue
            self._classes.add(base)
            for name, item in list(vars(base).items()):
                if isinstance(item, (staticmethod, classmethod)):
                    item = item.__func__
                if isinstance(item, property):
                    self._open.extend((item.fget, item.fset))
                elif isinstance(item, (types.FunctionType, MEMO)):
                    self._open.append(item)
                elif not name.startswith("__") and not hasattr(type(item), "__get__"):
                    self._attribute(AttributePlace(base, name, f"{base.__name__}.{name}"))
            names = frozenset(vars(base))
            self._undo.append(lambda base=base, names=names: [place.put(MISSING) for place, _ in added_to(base, names)])
            self._watch(added_to, base, names)

    def _state(self, value: Any) -> None:
        """Watch generators and arrays, which expose their own state."""
        if is_generator(value):
            remember_generators([value])
            state = read_generator(value)
            if state is not None:
                self._undo.append(functools.partial(write_generator, value, state))
        elif hasattr(value, "flags") and value.flags.writeable and not value.dtype.hasobject and value.nbytes <= LARGE:
            array, copy = ArrayPlace(value, "an array"), value.copy()
            self._undo.append(functools.partial(array.put, copy))
            self._watch(moved_array, array, copy)


def _set_arguments(partial: functools.partial[Any], arguments: tuple[Any, ...]) -> None:
    partial.__setstate__((partial.func, arguments, partial.keywords, partial.__dict__))  # type: ignore[attr-defined]


def _rebound(known: dict[str, Any], name: str, value: Any) -> None:
    if known.get(name) is not value:
        known[name] = value


def _set_again(place: AttributePlace, item: Any) -> None:
    if place.value() is not item:
        place.put(item)
