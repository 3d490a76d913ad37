"""Finds what enters or leaves a forward in another way than its arguments and its output.

Tensors with a graph that stay in attributes or in lists filled by forward hooks are joined like outputs. Otherwise only the
last micro-batch's tensor would remain, and gradients would be lost. Parameters of other modules that the forward uses are
found so that their gradients are staged, too. Not covered: detached values, and behavior that the checked samples do not
trigger.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memfit._errors import Refused
from memfit.batches.entries import Entries
from memfit.batches.tree import flat, leaves, path_name, tensors
from memfit.capture.argument_entries import ArgumentEntries
from memfit.capture.call import Call
from memfit.capture.side_outputs import ClosureVariable, Door, Doorway
from memfit.engine.call_context import uncompiled
from memfit.engine.gradients import is_sharded
from memfit.engine.known_means import leaves_of
from memfit.engine.places import MISSING, Place
from memfit.engine.planning_scope import reaching
from memfit.engine.state_snapshot import StateSnapshot, reached_from
from memfit.tracing.sandbox import leave_no_trace


@dataclass(frozen=True)
class SideEntrances:
    """What a forward uses and changes besides its module's own state."""

    parameters: tuple[torch.Tensor, ...]
    """Parameters outside the module that receive gradients through it."""
    writes_input: bool
    """Whether it writes into its input tensors."""
    watches: bool = False
    """Whether it registers hooks on tensors that it computes, or retains their gradients."""


class FoundDoors(Exception):
    """A forward leaves tensors in places where they can be joined."""

    def __init__(self, doors: Sequence[Door]) -> None:
        super().__init__(", ".join(door.name for door in doors))
        self.doors = tuple(doors)


@dataclass(frozen=True)
class _Place:
    """Where a tensor was found. `door` is None if it cannot be joined there."""

    name: str
    door: Door | None = None


def look_for_side_doors(call: Call, samples: int) -> SideEntrances:
    """Find the side entrances of a call's forward. Raises FoundDoors if a tensor with a graph outlives it outside its output,
    Refused if that cannot be joined."""
    named = _computed_by_hooks(call.model)
    looked_at = copy.copy(call)
    looked_at.copies = True
    tree = looked_at.arguments(0, samples)
    with reaching(tree), leave_no_trace(call.model, call.device), uncompiled(), torch.enable_grad():
        given, entries = [(t, t._version) for t in tensors(tree)], Entries(tree)
        watch, shared = _Made(), _Shared(call, tree)
        with watch:
            output = looked_at.output(tree)
        _refuse_changes(shared.changed())
        mine = {id(leaf) for _, leaf in leaves(output)}
        alive = _referred_to(watch.made, but=mine)
        inside = _reachable(leaf for _, leaf in leaves(output)) | entries.containers
        found = _holders(alive, call.model, inside=inside)
        found += _outputs_kept(output, call.model)
        found += [_Place(door.name, door) for door in (ArgumentEntries(),) if entries.changed()]
        places = [place for place in found if place.name not in named]
        _look_again([place.door for place in places if place.door is not None], looked_at, tree)
        own = {id(t) for t in (*call.model.parameters(), *(t for t, _ in given))}
        leaves_ = [] if is_sharded(call.model) else leaves_of(tensors(output))
        strangers = tuple(p for p in leaves_ if isinstance(p, nn.Parameter) and id(p) not in own)
        entrances = SideEntrances(strangers, any(t._version != version for t, version in given), watch.watches)
    doors = [place.door for place in places]
    known = call.plain.doors if isinstance(call.plain, Doorway) else ()
    again = [place for place in places if place.door is None or place.name in {door.name for door in known}]
    if places and not again:
        raise FoundDoors([*known, *doors])  # type: ignore[list-item]
    if places:
        name = again[0].name
        raise Refused(
            "cutting the batch into micro-batches",
            found=f"{name} holds a tensor with a graph after the forward; of several micro-batches only the last would "
            "be left there, and its gradient would be lost",
            next_move="return it from forward, or store it detached",
        )
    return entrances


def _look_again(doors: Sequence[Door], call: Call, tree: Any) -> None:
    """Let the doors see what a second forward makes of what the first one left: a list may be emptied, or grow."""
    doors = [door for door in doors if not door.copies_arguments]
    before = [door.before(tree) for door in doors]
    if any(isinstance(there, list) for there, _ in before):
        call.output(tree)
        for door, was in zip(doors, before):
            door.taken(was)


class _Shared:
    """What all micro-batches share of a call's arguments: objects of the script's, tensors without samples."""

    def __init__(self, call: Call, tree: Any) -> None:
        given, self._model = {id(leaf) for leaf in flat(call.tree)}, call.model
        axes = call.layout.axes if call.split is None else ()
        self._tensors = [
            (leaf, leaf._version, path_name(path))
            for (path, leaf), axis in zip(leaves(tree), axes)
            if axis is None and isinstance(leaf, torch.Tensor)
        ]
        others = [leaf for leaf in flat(tree) if id(leaf) in given and not isinstance(leaf, (torch.Tensor, nn.Module))]
        objects = [leaf for leaf in others if not callable(leaf)]
        self._types = {id(leaf.__dict__): type(leaf) for leaf in objects if hasattr(leaf, "__dict__")}
        self._before = StateSnapshot(objects, lambda tensor: None)

    def changed(self) -> list[str]:
        """Return the names of what the forward changed."""
        written = [name for tensor, version, name in self._tensors if tensor._version != version]
        moved = [place for place, before in self._before.moved() if not self._is_cache(place, before)]
        its = reached_from([self._model]) if moved else set()
        return [*written, *(place.label for place in moved if id(getattr(place, "holder", None)) not in its)]

    def _is_cache(self, place: Place, before: Any) -> bool:
        """Whether an object keeps something for itself: a `cached_property`, or under a private name that was empty."""
        name = str(getattr(place, "name", ""))
        kind = self._types.get(id(getattr(place, "holder", None)), object)
        cached = isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)
        empty = before is MISSING or before is None
        return (before is MISSING and cached) or (empty and name.startswith("_"))


def _refuse_changes(changed: Sequence[str]) -> None:
    if changed:
        raise Refused(
            "cutting the batch into micro-batches",
            found=f"the forward changes an object that it is given ({changed[0]}), as every micro-batch would",
            next_move="return the new value from forward, or keep it as an attribute of a module of the model",
        )


def _outputs_kept(output: Any, model: nn.Module) -> list[_Place]:
    """Attributes of modules that hold a tensor of the output."""
    mine = {id(leaf) for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return [
        _place(f"{name}.{key}" if name else key, vars(module), key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if id(value) in mine
    ]


class _Made(TorchFunctionMode):
    """Collects weak references to all new tensors with a graph. Sees whether gradients of tensors are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.watches = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.watches |= func in (torch.Tensor.register_hook, torch.Tensor.retain_grad)
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and item.grad_fn is not None:
                self.made.append(weakref.ref(item))
        return out


def _holders(alive: list[torch.Tensor], model: nn.Module, inside: set[int]) -> list[_Place]:
    """Places that refer to these tensors, other than the graph and the objects `inside` the output."""
    if not alive:
        return []
    wanted = {id(t) for t in alive}
    modules = {id(m.__dict__): (name, m.__dict__) for name, m in model.named_modules()}
    variables = _variables(model)
    found: list[_Place] = []
    for holder in gc.get_referrers(*alive):
        if holder is alive or id(holder) in inside or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, types.CellType):
            found += [_place(variables[id(holder)], ClosureVariable(holder), "it")] if id(holder) in variables else []
        elif id(holder) in modules:
            name, attributes = modules[id(holder)]
            keys = [key for key, value in attributes.items() if id(value) in wanted]
            found += [_place(f"{name}.{key}" if name else key, attributes, key) for key in keys]
        elif isinstance(holder, (list, tuple, dict, set)):
            found += _container(holder, modules, wanted)
        elif not _is_ours(holder):
            held = getattr(holder, "__dict__", {})
            kept = [key for key, value in held.items() if id(value) in wanted]
            found += [_place(f"{type(holder).__name__}.{key}", held, key) for key in kept]
    return list({place.name: place for place in found}.values())


def _referred_to(made: Iterable[weakref.ref[torch.Tensor]], but: set[int]) -> list[torch.Tensor]:
    """The tensors that Python objects refer to, but those with these ids.

    Reference counts tell which tensors the graph alone keeps: `gc.get_referrers` looks at all objects of the process, which
    takes 18 ms with torch alone and 48 ms with transformers.
    """
    alive = list({id(tensor): tensor for tensor in (each() for each in made) if tensor is not None}.values())
    if USUAL:
        alive = [tensor for tensor, count in zip(alive, _references(alive)) if count > USUAL]
    return [tensor for tensor in alive if id(tensor) not in but]


def _references(tensors: Sequence[Any]) -> list[int]:
    """References by Python objects, as torch 2.13 counts them: C++ has one more, if it has any."""
    return [sys.getrefcount(tensor) - (tensor._use_count() > 1) for tensor in tensors]


def _of_the_graph_alone() -> int:
    """What `_references` returns for a tensor that only a graph refers to. 0 if this torch counts in another way."""
    with torch.inference_mode(False), torch.enable_grad():
        kept = torch.ones(1, device="cpu", requires_grad=True) * 1
        graph, reference, named = kept.sin(), weakref.ref(kept), torch.ones(1, device="cpu")
    if not hasattr(kept, "_use_count"):
        return 0
    (both,), (python,) = _references([kept]), _references([named])
    del kept
    alive = [each for each in (reference(),) if each is not None]
    (alone,) = _references(alive) or [0]
    del graph
    return alone if 0 < alone and alone + 1 == both == python else 0


USUAL = _of_the_graph_alone()


def _place(name: str, owner: Any, key: str) -> _Place:
    return _Place(name, Door(name, owner, key))


def _variables(model: nn.Module) -> dict[int, str]:
    """Closure variables of the model's forward hooks, by id."""
    found = {}
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            code = getattr(hook, "__code__", None)
            if code is not None:
                names = zip(code.co_freevars, getattr(hook, "__closure__", None) or ())
                found |= {id(cell): f"the variable {name} of {hook.__qualname__}" for name, cell in names}
    return found


def _container(holder: Any, modules: dict[int, tuple[str, dict[str, Any]]], wanted: set[int]) -> list[_Place]:
    for name, attributes in modules.values():
        for key, value in attributes.items():
            if value is holder:
                place = f"{name}.{key}" if name else key
                return [_Place(place) if isinstance(holder, set) else _place(place, attributes, key)]
    if isinstance(holder, tuple) or _belongs_to_ours(holder):
        return []
    for owner in gc.get_referrers(holder):
        if isinstance(holder, dict) and getattr(owner, "__dict__", None) is holder:
            keys = [key for key, value in holder.items() if id(value) in wanted]
            return [_place(f"{getattr(owner, '__name__', type(owner).__name__)}.{key}", holder, key) for key in keys]
    if isinstance(holder, set):
        return []
    name = f"a {type(holder).__name__} outside the model (filled by a forward hook?)"
    return [_place(name, {"it": holder}, "it")]


def _belongs_to_ours(holder: Any) -> bool:
    """Whether the container is, or lies in, an object that is not the script's."""
    open_, seen = [holder], {id(holder)}
    for _ in range(3):
        owners = [o for o in gc.get_referrers(*open_) if o is not open_ and id(o) not in seen and not _is_looking(o)]
        if any(_is_ours(owner) for owner in owners):
            return True
        seen.update(id(owner) for owner in owners)
        open_ = [owner for owner in owners if isinstance(owner, (list, tuple, dict, set))]
        if not open_:
            return False
    return False


def _is_looking(owner: Any) -> bool:
    """Whether it refers to a place only to search it, or to serve another model."""
    return isinstance(owner, Door) or (isinstance(owner, types.FrameType) and owner.f_code.co_filename == __file__)


def _is_ours(owner: Any) -> bool:
    """Whether it is state of a custom autograd function, or belongs to torch or memfit."""
    if isinstance(owner, types.FrameType):
        return "memfit" in owner.f_code.co_filename
    kind = type(owner).__module__.split(".")[0]
    return isinstance(owner, (torch._C._FunctionBase, torch.Tensor)) or kind in ("torch", "memfit", "weakref")


def _reachable(roots: Iterable[Any]) -> set[int]:
    """Ids of objects in the output other than its leaves, such as caches."""
    found: set[int] = set()
    open_ = [root for root in roots if not isinstance(root, (torch.Tensor, nn.Module, type, types.FunctionType))]
    for _ in range(6):
        fresh = [o for o in open_ if id(o) not in found]
        found.update(id(o) for o in fresh)
        kinds = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType)
        open_ = [o for o in gc.get_referents(*fresh) if not isinstance(o, kinds)] if fresh else []
    return found


def _computed_by_hooks(model: nn.Module) -> set[str]:
    """Attributes that a hook recomputes before every forward (weight norm, spectral norm)."""
    return {
        f"{name}.{hook.name}" if name else hook.name  # type: ignore[attr-defined]
        for name, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(getattr(hook, "name", None), str)
    }
